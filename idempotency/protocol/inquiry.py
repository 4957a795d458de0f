"""What has become of a key. Nothing runs, nothing is claimed, and no payload is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from django.db.models import DateTimeField, ExpressionWrapper, TextField
from django.db.models.functions import Cast, Left, Now

from ..identity.scope import Scope
from ..lifecycle import Decision, decide
from ..models import IdempotencyRecord
from ..operation import Operation
from ..outcome import BODY_GONE
from ..sql import Row, status_of
from . import claims
from .transactions import alias_of, store_errors

#: What the client is told, by what a retry with the same payload would meet. A claim that is cut off is told as what
#: its retry makes of it.
_STATUS_OF = {
    Decision.WAIT: "in_progress",
    Decision.REPLAY: "completed",
    Decision.TAKE_OVER: "recoverable",
    Decision.RECONCILE: "recoverable",
    Decision.PARK: "parked",
    Decision.REPORT_PARKED: "parked",
}


@dataclass(frozen=True)
class KeyStatus:
    """What has become of a key.

    ``status`` is one of ``in_progress``, ``completed``, ``recoverable`` (no attempt is at work and no outcome is
    recorded, so a retry runs the operation or finds out), ``parked`` and ``unknown`` (there is no record, or its
    retention is over). The times and ``response_status`` are None if they aren't known. ``body_gone`` says that a retry
    of a completed request gets a ``BodyGoneError`` in place of its response. ``retry_after`` is in seconds.
    """

    status: str = "unknown"
    response_status: int | None = None
    body_gone: bool = False
    created_at: datetime | None = None
    completed_at: datetime | None = None
    expires_at: datetime | None = None
    retry_after: int | None = None


def key_status(operation: Operation, scope: Scope) -> KeyStatus:
    """Look a key up, by one read.

    :raises UnavailableError: the record can't be read.
    """
    using = alias_of(scope)
    records = IdempotencyRecord.objects.using(using).in_scope(scope.account_id, scope.operation, scope.idempotency_key)
    # The mark of a deleted body is short, and a body may be a megabyte.
    computed = {
        "now": ExpressionWrapper(Now(), DateTimeField()),
        "mark": Left(Cast("response_body", TextField()), len(BODY_GONE) + 1),
    }
    fields = ("status", "response_status", "response_reference", "created_at", "completed_at", "expires_at")
    with store_errors(using):
        found = records.annotate(**computed).values(*fields, "lease_expires_at", *computed).first()
    if found is None:
        return KeyStatus()
    now, lease_expires_at = found["now"], found["lease_expires_at"]
    row = Row(
        id=0,
        attempt=0,
        status=status_of(found["status"]),
        request_hash="",
        lease_left=0.0 if lease_expires_at is None else (lease_expires_at - now).total_seconds(),
        retention_over=found["expires_at"] <= now,
        outcome=None,
    )
    decision = decide(
        row.status,
        lease_over=row.lease_over,
        retention_over=row.retention_over,
        same_payload=True,
        recovery=operation.recovery,
    )
    if decision is Decision.START_OVER:
        return KeyStatus()
    status = KeyStatus(_STATUS_OF[decision], created_at=found["created_at"], expires_at=found["expires_at"])
    if decision is Decision.WAIT:
        return replace(status, retry_after=claims.retry_after(row, operation))
    if decision is Decision.REPLAY:
        is_rebuilt = found["response_reference"] is not None and operation.rebuild is not None
        return replace(
            status,
            response_status=found["response_status"],
            body_gone=found["mark"] == BODY_GONE and not is_rebuilt,
            completed_at=found["completed_at"],
        )
    return status
