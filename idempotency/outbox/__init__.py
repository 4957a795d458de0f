"""The outbox: a message is published if and only if the transaction that published it committed.

An app: add ``"idempotency.outbox"`` to ``INSTALLED_APPS``. ``publishing`` writes messages. ``relay`` hands them to a
broker. ``backlog`` counts waiting messages, requeues dead ones and purges sent ones. To send through another broker,
write a sender: a callable that takes a message and returns when the broker has confirmed it. Name it by its dotted path
in ``publish(sender=...)``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .publishing import CELERY, publish

__all__ = ["CELERY", "publish"]


def __getattr__(name: str) -> Any:
    # At first use, because it needs the models, and Django imports an app's package before its models.
    if name in __all__:
        return getattr(import_module(f"{__name__}.publishing"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
