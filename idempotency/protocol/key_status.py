"""Reports the status of keys. Runs and claims nothing, and needs no payload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from ..identity.scope import Scope
from ..lifecycle import Decision, decide
from ..models import IdempotencyRecord
from ..operation import Policy
from ..store import BY_ITS_CLOCK, records_database, status_of
from .decisions import retry_after
from .ownership import store_errors

#: The status that a client gets, by the decision about a retry with the same payload.
_STATUS_OF = {
    Decision.WAIT: "in_progress",
    Decision.REPLAY: "completed",
    Decision.TAKE_OVER: "recoverable",
    Decision.RECONCILE: "recoverable",
    Decision.PARK: "parked",
    Decision.REPORT_PARKED: "parked",
}


_FIELDS = (
    *("account_id", "operation", "idempotency_key", "status", "response_status"),
    *("created_at", "completed_at", "expires_at"),
)


@dataclass(frozen=True)
class KeyStatus:
    status: str = "unknown"
    response_status: int | None = None
    created_at: datetime | None = None
    completed_at: datetime | None = None
    expires_at: datetime | None = None
    #: Seconds, if the status is ``in_progress``.
    retry_after: int | None = None


def key_statuses(requested: Mapping[Scope, Policy]) -> dict[Scope, KeyStatus]:
    """Look up keys of one account, with one query for each database. Unknown keys are left out.

    :raises UnavailableError: the records can't be read.
    """
    by_database: dict[str, list[Scope]] = {}
    for scope in requested:
        using = records_database(operation=scope.operation, account_id=scope.account_id)
        by_database.setdefault(using, []).append(scope)
    found = {}
    for using, scopes in by_database.items():
        records = IdempotencyRecord.objects.using(using).filter(
            account_id=scopes[0].account_id,
            operation__in=[scope.operation for scope in scopes],
            idempotency_key__in={scope.idempotency_key for scope in scopes},
        )
        with store_errors(using):
            for record in records.annotate(**BY_ITS_CLOCK).order_by("created_at", "pk").only(*_FIELDS):
                scope = Scope(record.account_id, record.operation, record.idempotency_key)
                if scope in requested and (status := _status_of_record(record, requested[scope])) is not None:
                    found[scope] = status
    return found


def _status_of_record(record: Any, policy: Policy) -> KeyStatus | None:
    lease_left = (record.lease_left or timedelta(0)).total_seconds()
    decision = decide(
        status_of(record.status),
        lease_over=lease_left <= 0,
        retention_over=record.retention_over,
        same_payload=True,
        recovery=policy.recovery,
    )
    if decision is Decision.START_OVER:
        return None
    status = KeyStatus(_STATUS_OF[decision], created_at=record.created_at, expires_at=record.expires_at)
    if decision is Decision.WAIT:
        return replace(status, retry_after=retry_after(lease_left, policy))
    if decision is Decision.REPLAY:
        return replace(status, response_status=record.response_status, completed_at=record.completed_at)
    return status
