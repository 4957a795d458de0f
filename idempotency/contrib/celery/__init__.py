"""Celery: tasks that take effect once for each message, messages sent by the outbox, and traces from task to task.

An app: add ``"idempotency.contrib.celery"`` to ``INSTALLED_APPS``. This module has the public names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .. import needing

with needing("celery"):
    import celery.signals  # noqa: F401

from ...conf import require_app

if TYPE_CHECKING:
    from .consuming import idempotent_task
    from .deliveries import redrive
    from .lost import resend_lost_messages
    from .publishing import CelerySender, send

_HOMES = {
    "CelerySender": "publishing",
    "idempotent_task": "consuming",
    "redrive": "deliveries",
    "resend_lost_messages": "lost",
    "send": "publishing",
}

__all__ = ["CelerySender", "idempotent_task", "redrive", "resend_lost_messages", "send"]


def __getattr__(name: str) -> Any:
    # At first use, because they need the models, and Django imports an app's package before its models.
    if name in _HOMES:
        require_app(__name__)
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
