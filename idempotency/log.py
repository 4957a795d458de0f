"""Logging: a filter that adds the operation to each line, and a line for each event. ``LOGGING`` enables both."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

from django.dispatch import Signal

from . import signals
from .identity.keys import shorten
from .identity.scope import Scope
from .operation import Operation
from .protocol.context import current_claim

EVENTS = "idempotency.events"

logger: Final = logging.getLogger(EVENTS)


class ClaimFilter(logging.Filter):
    """Adds attributes to each log record, which a formatter can show::

        "filters": {"claim": {"()": "idempotency.ClaimFilter"}},
        "formatters": {"plain": {"format": "%(message)s %(idempotency_operation)s %(idempotency_trace)s"}},

    The attributes are ``idempotency_operation`` (str), ``idempotency_key`` (str, the beginning of the key),
    ``idempotency_trace`` (str) and ``idempotency_attempt`` (int) of the current claim, or empty strings outside of a
    claim. Existing attributes are kept. Every record passes.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        claim = current_claim()
        attributes = vars(record)
        attributes.setdefault("idempotency_operation", claim.operation.name if claim else "")
        attributes.setdefault("idempotency_key", shorten(claim.scope.idempotency_key) if claim else "")
        attributes.setdefault("idempotency_trace", claim.trace if claim else "")
        attributes.setdefault("idempotency_attempt", claim.attempt if claim else "")
        return True


def connect_if_named() -> None:
    """Log each event, as one line at level info, if ``LOGGING`` gives the logger ``idempotency.events`` a level.

    The account is not logged, and only the beginning of the key.
    """
    if logger.level == logging.NOTSET:
        return
    for event, signal in vars(signals).items():
        if isinstance(signal, Signal):
            signal.connect(_receiver(event), weak=False, dispatch_uid=f"{EVENTS}.{event}")


def _receiver(event: str) -> Callable[..., None]:
    def note(sender: Any, signal: Signal, **arguments: Any) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        account_id, key = arguments.pop("account_id", None), arguments.pop("idempotency_key", None)
        members: dict[str, Any] = {}
        if isinstance(sender, Operation):
            members["operation"] = sender.name
            if key is not None:
                members["key"] = shorten(key)
                members["trace"] = Scope(account_id, sender.name, key).trace
        members |= {name: str(value) if isinstance(value, UUID) else value for name, value in arguments.items()}
        text = ", ".join(f"{name} {value!r}" for name, value in members.items())
        extra = {f"idempotency_{name}": value for name, value in {"event": event, **members}.items()}
        logger.info("%s: %s", event, text, extra=extra)

    return note
