"""Celery: tasks that take effect once per message, a sender for the outbox, and traces from task to task.

An app: add ``"idempotency.contrib.celery"`` to ``INSTALLED_APPS``.
"""

from typing import TYPE_CHECKING, Any

from .. import needing

with needing("celery"):
    import celery.signals  # noqa: F401

from ...conf import require_app
from ...public import lazy

if TYPE_CHECKING:
    from .consuming import idempotent_task
    from .deliveries import redrive
    from .lost import resend_lost_messages
    from .publishing import CelerySender, send

__all__ = ["CelerySender", "idempotent_task", "redrive", "resend_lost_messages", "send"]

_get = lazy(
    __name__,
    {
        "CelerySender": "publishing",
        "idempotent_task": "consuming",
        "redrive": "deliveries",
        "resend_lost_messages": "lost",
        "send": "publishing",
    },
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        require_app(__name__)
    return _get(name)
