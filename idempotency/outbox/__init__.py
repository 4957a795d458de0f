"""The outbox: a message is published if and only if the transaction that published it committed.

An app: add ``"idempotency.outbox"`` to ``INSTALLED_APPS``. To use a broker other than Celery's, pass
``publish(sender=...)`` the dotted path of a callable that takes a message and returns when the broker has confirmed it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..public import Getter, lazy

if TYPE_CHECKING:
    from .models import MessageStatus, OutboxMessage
    from .publishing import CELERY, publish
    from .relay import RelayResult, relay_batches
    from .upkeep import Backlog, backlog, purge_sent_batches, requeue

__all__ = [
    "CELERY",
    "Backlog",
    "MessageStatus",
    "OutboxMessage",
    "RelayResult",
    "backlog",
    "publish",
    "purge_sent_batches",
    "relay_batches",
    "requeue",
]

__getattr__: Getter = lazy(
    __name__,
    {
        **dict.fromkeys(("CELERY", "publish"), "publishing"),
        **dict.fromkeys(("MessageStatus", "OutboxMessage"), "models"),
        **dict.fromkeys(("RelayResult", "relay_batches"), "relay"),
        **dict.fromkeys(("Backlog", "backlog", "purge_sent_batches", "requeue"), "upkeep"),
    },
)
