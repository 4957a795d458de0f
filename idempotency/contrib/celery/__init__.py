"""Celery: tasks that take effect once per message, a sender for the outbox, and traces from task to task.

An app: add ``"idempotency.contrib.celery"`` to ``INSTALLED_APPS``.
"""

from typing import TYPE_CHECKING

from .. import needing

with needing("celery"):
    import celery.signals  # noqa: F401

from ...public import Getter, lazy

if TYPE_CHECKING:
    from .consuming import idempotent_task
    from .deliveries import redrive
    from .lost import resend_lost_messages
    from .publishing import CelerySender, send

__all__ = ["CelerySender", "idempotent_task", "redrive", "resend_lost_messages", "send"]

__getattr__: Getter = lazy(
    __name__,
    {
        "CelerySender": "publishing",
        "idempotent_task": "consuming",
        "redrive": "deliveries",
        "resend_lost_messages": "lost",
        "send": "publishing",
    },
)
