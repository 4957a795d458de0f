"""Claims with Django's ORM: the same compare-and-sets, with the database's clock by ``Now()``.

If a scope has a record, the unique constraint refuses the insert. INSERT IGNORE is not used, because on MySQL it
truncates an over-long key even in strict mode, so that two keys could become one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

from django.db import IntegrityError, ProgrammingError
from django.db.models import DateTimeField, ExpressionWrapper, F, Q, QuerySet, Value
from django.db.models.functions import Greatest, Now

from ...identity.scope import Scope
from ...lifecycle import Status
from ...models import IdempotencyRecord
from ...outcome import Outcome
from ..store import Fence, Row, Store, status_of
from ..watch import TransactionWatch


class Claims(Store):
    """Claims, the transactions around them, and what errors mean where a database doesn't say more."""

    def bounded_wait(self) -> AbstractContextManager[Any]:
        """Bound how long the statement in the block waits for a lock, if the database can do that."""
        return nullcontext()

    def insert_claim(
        self, scope: Scope, request_hash: str, *, lease: timedelta, ttl: timedelta, wait_for_disk: bool
    ) -> int | None:
        with self.bounded_wait():
            record = IdempotencyRecord.objects.using(self.using).create(
                account_id=scope.account_id,
                operation=scope.operation,
                idempotency_key=scope.idempotency_key,
                request_hash=request_hash,
                status=Status.IN_PROGRESS,
                lease_expires_at=_from_now(lease),
                expires_at=_from_now(ttl),
            )
        return record.pk

    def read(self, scope: Scope) -> Row | None:
        record = self._records(scope).annotate(now=ExpressionWrapper(Now(), DateTimeField())).values().first()
        if record is None:
            return None
        now, lease_expires_at = record["now"], record["lease_expires_at"]
        status = status_of(record["status"])
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

    def take_over(self, scope: Scope, row: Row, *, lease: timedelta, ttl: timedelta) -> bool:
        claimable = Q(status=Status.RECOVERABLE) | Q(status=Status.IN_PROGRESS, lease_expires_at__lte=Now())
        return self._change_one(
            self._observed(scope, row).filter(claimable),
            status=Status.IN_PROGRESS,
            attempt=F("attempt") + 1,
            lease_expires_at=_from_now(lease),
            expires_at=_kept(ttl),
        )

    def start_over(self, scope: Scope, row: Row, request_hash: str, *, lease: timedelta, ttl: timedelta) -> bool:
        live = Q(status=Status.IN_PROGRESS, lease_expires_at__gt=Now())
        return self._change_one(
            self._observed(scope, row).filter(~live, expires_at__lte=Now()),
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
            error=None,
            body_expires_at=None,
        )

    def park_abandoned(self, scope: Scope, row: Row) -> bool:
        abandoned = self._observed(scope, row).filter(status=Status.IN_PROGRESS, lease_expires_at__lte=Now())
        return self._change_one(abandoned, status=Status.PARKED, lease_expires_at=None)

    def complete(self, fence: Fence, outcome: Outcome, *, ttl: timedelta, body_ttl: timedelta | None = None) -> bool:
        end_of_body = {} if body_ttl is None else {"body_expires_at": _from_now(body_ttl)}
        return self._change_one(
            self._fenced(fence),
            status=Status.COMPLETED,
            completed_at=Now(),
            lease_expires_at=None,
            expires_at=_kept(ttl),
            response_status=outcome.status,
            response_headers=outcome.headers,
            response_body=outcome.body,
            response_reference=outcome.reference,
            **end_of_body,
        )

    def set_lease(self, fence: Fence, duration: timedelta, *, ttl: timedelta) -> bool:
        return self._change_one(self._fenced(fence), lease_expires_at=_from_now(duration), expires_at=_kept(ttl))

    def release(self, fence: Fence, error: str | None = None) -> bool:
        return self._end(fence, Status.RECOVERABLE, error)

    def park(self, fence: Fence, error: str | None = None) -> bool:
        return self._end(fence, Status.PARKED, error)

    def _end(self, fence: Fence, status: Status, error: str | None) -> bool:
        known: dict[str, Any] = {} if error is None else {"error": error}
        return self._change_one(self._fenced(fence), status=status, lease_expires_at=None, **known)

    def commit_at_once(self) -> None:
        """Do nothing: SQLite has no round trips to save, and the others may need them for autocommit."""

    def bound_transaction(
        self,
        *,
        idle: timedelta,
        statement: timedelta | None = None,
        lock: timedelta | None = None,
        wait_for_disk: bool = True,
    ) -> None:
        """Do nothing: neither SQLite nor MySQL has such limits for one transaction."""

    def watch_transaction(self) -> TransactionWatch:
        return TransactionWatch(self.connection, lambda: True)  # the driver doesn't tell

    def lost_a_race(self, error: BaseException) -> bool:
        return False

    def timed_out_waiting(self, error: BaseException) -> bool:
        return False

    def was_broken_before(self, error: BaseException) -> bool:
        return False  # a failed statement only rolls back itself

    def commit_was_refused(self, error: BaseException) -> bool:
        return isinstance(error, IntegrityError)  # a deferred constraint; after other errors COMMIT may have succeeded

    def is_permanent(self, error: BaseException) -> bool:
        return isinstance(error, ProgrammingError)

    def is_duplicate(self, error: BaseException) -> bool:
        return isinstance(error, IntegrityError)

    def _change_one(self, rows: QuerySet[IdempotencyRecord], **changes: Any) -> bool:
        # Each of these updates changes the status, the attempt or a time. So a database that counts changed rows and
        # not matched rows (MySQL) returns the same number.
        with self.bounded_wait():
            return rows.update(**changes) == 1

    def _records(self, scope: Scope) -> QuerySet[IdempotencyRecord]:
        return IdempotencyRecord.objects.using(self.using).filter(
            account_id=scope.account_id, operation=scope.operation, idempotency_key=scope.idempotency_key
        )

    def _observed(self, scope: Scope, row: Row) -> QuerySet[IdempotencyRecord]:
        return self._records(scope).filter(id=row.id, attempt=row.attempt, request_hash=row.request_hash)

    def _fenced(self, fence: Fence) -> QuerySet[IdempotencyRecord]:
        return self._records(fence.scope).filter(
            id=fence.id, attempt=fence.attempt, request_hash=fence.request_hash, status=Status.IN_PROGRESS
        )


def _from_now(duration: timedelta) -> ExpressionWrapper[Any]:
    return ExpressionWrapper(Now() + Value(duration), output_field=DateTimeField())


def _kept(ttl: timedelta) -> Greatest:
    """The end of a retention that begins now. If the retention already ends later, it stays."""
    return Greatest(F("expires_at"), _from_now(ttl))
