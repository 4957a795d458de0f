"""The dashboard: counts of events in all processes, a page of the admin with them, and timelines of records.

An app: add ``"idempotency.contrib.dashboard"`` to ``INSTALLED_APPS``. Without it nothing is counted, and the statistics
have no events.
"""

from typing import TYPE_CHECKING

from ...public import Getter, lazy

if TYPE_CHECKING:
    from .counting import Counters, counters

__all__ = ["Counters", "counters"]

__getattr__: Getter = lazy(__name__, {"Counters": "counting", "counters": "counting"})
