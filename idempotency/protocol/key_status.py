"""What has become of a key. Nothing runs, nothing is claimed, and no payload is needed."""

from __future__ import annotations

from dataclasses import replace

from django.db.models.functions import Now

from ..identity.keys import KeyStatus
from ..identity.scope import Scope
from ..lifecycle import Decision, decide
from ..models import IdempotencyRecord
from ..operation import Policy
from ..store import records_database, status_of
from . import acquisition
from .ownership import store_errors

#: The status that a client reads, by what a retry with the same payload would meet.
_STATUS_OF = {
    Decision.WAIT: "in_progress",
    Decision.REPLAY: "completed",
    Decision.TAKE_OVER: "recoverable",
    Decision.RECONCILE: "recoverable",
    Decision.PARK: "parked",
    Decision.REPORT_PARKED: "parked",
}


def key_status(policy: Policy, scope: Scope) -> KeyStatus:
    """Look a key up, by one read.

    :raises UnavailableError: the record can't be read.
    """
    using = records_database(operation=scope.operation, account_id=scope.account_id)
    records = IdempotencyRecord.objects.using(using).in_scope(scope.account_id, scope.operation, scope.idempotency_key)
    fields = ("status", "response_status", "created_at", "completed_at", "expires_at", "lease_expires_at", "now")
    with store_errors(using):
        found = records.annotate(now=Now()).values(*fields).first()
    if found is None:
        return KeyStatus()
    now, lease_expires_at = found["now"], found["lease_expires_at"]
    decision = decide(
        status_of(found["status"]),
        lease_over=lease_expires_at is None or lease_expires_at <= now,
        retention_over=found["expires_at"] <= now,
        same_payload=True,
        recovery=policy.recovery,
    )
    if decision is Decision.START_OVER:
        return KeyStatus()
    status = KeyStatus(_STATUS_OF[decision], created_at=found["created_at"], expires_at=found["expires_at"])
    if decision is Decision.WAIT:
        return replace(status, retry_after=acquisition.retry_after((lease_expires_at - now).total_seconds(), policy))
    if decision is Decision.REPLAY:
        return replace(status, response_status=found["response_status"], completed_at=found["completed_at"])
    return status
