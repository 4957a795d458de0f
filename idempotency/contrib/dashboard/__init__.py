"""The dashboard: counts of events in all processes, and an admin page that shows them.

An app: add ``"idempotency.contrib.dashboard"`` to ``INSTALLED_APPS``. Without it, the statistics contain no events.
"""

from typing import TYPE_CHECKING

from ...public import Getter, lazy

if TYPE_CHECKING:
    from .counting import Counters, counters

__all__ = ["Counters", "counters"]

__getattr__: Getter = lazy(__name__, {"Counters": "counting", "counters": "counting"})
