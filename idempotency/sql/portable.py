"""SQLite, and any database behind Django's ORM: the same compare-and-sets, with the database's clock through ``Now()``.

The claim is an insert that a unique constraint refuses. Not INSERT IGNORE: on MySQL it truncates an over-long key,
even in strict mode, and so makes two keys one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import IntegrityError, OperationalError
from django.db.models import DateTimeField, ExpressionWrapper, F, Q, QuerySet, Value
from django.db.models.functions import Now

from ..lifecycle import Status
from ..models import IdempotencyRecord
from ..outcome import Outcome
from ..scope import Scope
from . import Fence, Row

#: InnoDB's errors for a deadlock and for a lock wait that timed out, as the driver gives them.
MYSQL_DEADLOCK = 1213
MYSQL_LOCK_WAIT_TIMEOUT = 1205


def _from_now(duration: timedelta) -> ExpressionWrapper[Any]:
    return ExpressionWrapper(Now() + Value(duration), output_field=DateTimeField())


def insert_claim(
    using: str, scope: Scope, request_hash: str, *, lease: timedelta, ttl: timedelta, wait_for_disk: bool
) -> int | None:
    """:raises IntegrityError: the scope has a record already."""
    record = IdempotencyRecord.objects.using(using).create(
        account_id=scope.account_id,
        operation=scope.operation,
        idempotency_key=scope.idempotency_key,
        request_hash=request_hash,
        status=Status.IN_PROGRESS,
        lease_expires_at=_from_now(lease),
        expires_at=_from_now(ttl),
    )
    return record.pk


def read(using: str, scope: Scope) -> Row | None:
    record = _records(using, scope).annotate(now=ExpressionWrapper(Now(), DateTimeField())).values().first()
    if record is None:
        return None
    now, lease_expires_at = record["now"], record["lease_expires_at"]
    status = Status(record["status"])
    return Row(
        id=record["id"],
        attempt=record["attempt"],
        status=status,
        request_hash=record["request_hash"],
        lease_left=0.0 if lease_expires_at is None else (lease_expires_at - now).total_seconds(),
        retention_over=record["expires_at"] <= now,
        outcome=Outcome.stored(
            record["response_status"],
            record["response_headers"],
            record["response_body"],
            record["response_reference"],
        )
        if status is Status.COMPLETED
        else None,
    )


def bound_transaction(using: str, *, idle: timedelta, statement: timedelta) -> None:
    """SQLite's processes share a machine and MySQL has no such bounds for one transaction."""


def take_over(using: str, scope: Scope, row: Row, lease: timedelta) -> bool:
    claimable = Q(status=Status.RECOVERABLE) | Q(status=Status.IN_PROGRESS, lease_expires_at__lte=Now())
    return _changed_one(
        _observed(using, scope, row).filter(claimable),
        status=Status.IN_PROGRESS,
        attempt=F("attempt") + 1,
        lease_expires_at=_from_now(lease),
    )


def start_over(using: str, scope: Scope, row: Row, request_hash: str, *, lease: timedelta, ttl: timedelta) -> bool:
    live = Q(status=Status.IN_PROGRESS, lease_expires_at__gt=Now())
    return _changed_one(
        _observed(using, scope, row).filter(~live, expires_at__lte=Now()),
        status=Status.IN_PROGRESS,
        attempt=F("attempt") + 1,
        request_hash=request_hash,
        lease_expires_at=_from_now(lease),
        expires_at=_from_now(ttl),
        created_at=Now(),
        completed_at=None,
        response_status=None,
        response_headers=None,
        response_body=None,
        response_reference=None,
    )


def park_abandoned(using: str, scope: Scope, row: Row) -> bool:
    abandoned = _observed(using, scope, row).filter(status=Status.IN_PROGRESS, lease_expires_at__lte=Now())
    return _changed_one(abandoned, status=Status.PARKED, lease_expires_at=None)


def complete(using: str, fence: Fence, outcome: Outcome) -> bool:
    return _changed_one(
        _fenced(using, fence),
        status=Status.COMPLETED,
        completed_at=Now(),
        lease_expires_at=None,
        response_status=outcome.status,
        response_headers=outcome.headers,
        response_body=outcome.body,
        response_reference=outcome.reference,
    )


def set_lease(using: str, fence: Fence, duration: timedelta) -> bool:
    return _changed_one(_fenced(using, fence), lease_expires_at=_from_now(duration))


def release(using: str, fence: Fence) -> bool:
    return _changed_one(_fenced(using, fence), status=Status.RECOVERABLE, lease_expires_at=None)


def park(using: str, fence: Fence) -> bool:
    return _changed_one(_fenced(using, fence), status=Status.PARKED, lease_expires_at=None)


def _records(using: str, scope: Scope) -> QuerySet[IdempotencyRecord]:
    return IdempotencyRecord.objects.using(using).filter(
        account_id=scope.account_id, operation=scope.operation, idempotency_key=scope.idempotency_key
    )


def _observed(using: str, scope: Scope, row: Row) -> QuerySet[IdempotencyRecord]:
    return _records(using, scope).filter(id=row.id, attempt=row.attempt, request_hash=row.request_hash)


def _fenced(using: str, fence: Fence) -> QuerySet[IdempotencyRecord]:
    return _records(using, fence.scope).filter(
        id=fence.id, attempt=fence.attempt, request_hash=fence.request_hash, status=Status.IN_PROGRESS
    )


def _changed_one(rows: QuerySet[IdempotencyRecord], **changes: Any) -> bool:
    # Every one of these changes the status, the attempt or both, so a database that counts changed rows instead of
    # matched ones (MySQL) counts the same.
    return rows.update(**changes) == 1


def lost_a_race(error: OperationalError) -> bool:
    return error.args[:1] == (MYSQL_DEADLOCK,)


def timed_out_waiting(error: OperationalError) -> bool:
    return error.args[:1] == (MYSQL_LOCK_WAIT_TIMEOUT,)


def was_broken_before(error: BaseException) -> bool:
    return False  # a statement that fails undoes itself only, and the transaction goes on


def commit_was_refused(error: BaseException) -> bool:
    return isinstance(error, IntegrityError)  # a deferred constraint; anything else may hide a commit
