"""The store of SQLite, and of databases without a store of their own: Django's ORM and the database's clock.

If a scope has a record, the unique constraint refuses the insert. INSERT IGNORE is not used, because on MySQL it
truncates an over-long key even in strict mode, so that two keys could become one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta
from itertools import product
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.db import IntegrityError, OperationalError, ProgrammingError, transaction
from django.db.models import BigIntegerField, DateTimeField, ExpressionWrapper, F, Q, QuerySet, Value
from django.db.models.functions import Greatest, Now

from ..identity.scope import Scope
from ..lifecycle import Status
from ..models import IdempotencyRecord, IdempotencyStep, RecordQuerySet
from ..outcome import BODY_GONE, Outcome
from .base import Fence, Row, Store, Taken, status_of
from .transaction_guard import TransactionWatch

if TYPE_CHECKING:
    from ..outbox.models import OutboxMessage


class PortablePurge(Store):
    """The purge: a SELECT locks the oldest rows that are due and free. Statements by their ids follow.

    On SQLite nothing is locked. There the SELECT and what follows see one snapshot, and a transaction that writes after
    another one has written is refused.
    """

    def delete_records(self, statuses: Collection[Status], limit: int, after: datetime | None) -> Taken:
        due = RecordQuerySet(IdempotencyRecord, using=self.using).past_retention().filter(status__in=statuses)
        return self._change_oldest(due, "expires_at", limit, after, self._delete_with_steps)

    def delete_bodies(self, limit: int, after: datetime | None) -> Taken:
        due = RecordQuerySet(IdempotencyRecord, using=self.using).with_body_past_retention()
        return self._change_oldest(due, "body_expires_at", limit, after, self._delete_bodies)

    def delete_rows(self, due: QuerySet[Any], due_at: str, limit: int, after: datetime | None) -> Taken:
        return self._change_oldest(due, due_at, limit, after, lambda rows, accounts: rows.delete()[0])

    def _change_oldest(
        self,
        due: QuerySet[Any],
        due_at: str,
        limit: int,
        after: datetime | None,
        change: Callable[[QuerySet[Any], dict[int, str]], int],
    ) -> Taken:
        """Change the oldest rows of ``due``.

        :param change: changes some of the rows and returns their number. It also gets their ids and accounts.
        """
        oldest = due if after is None else due.filter(**{f"{due_at}__gte": after})
        found = self.select_unlocked(oldest.order_by(due_at).values_list("pk", "account_id", due_at), limit)
        # A statement takes a bounded number of parameters, and names each row twice at most. On SQLite that number is
        # low, so there is room for the conditions' own.
        step = max(1, self.connection.ops.bulk_batch_size([due.model._meta.pk] * 3, found))
        changed = 0
        for start in range(0, len(found), step):
            accounts = {pk: account for pk, account, _ in found[start : start + step]}
            # The conditions are repeated for a database that neither locks the rows nor keeps a snapshot of them.
            changed += change(due.filter(pk__in=list(accounts)), accounts)
        return Taken(changed, len(found), max((moment for *_, moment in found), default=None))

    def _delete_with_steps(self, records: QuerySet[Any], accounts: dict[int, str]) -> int:
        self._delete_steps(accounts)
        return records.delete()[0]

    def _delete_bodies(self, records: QuerySet[Any], accounts: dict[int, str]) -> int:
        self._delete_steps(accounts)
        gone: dict[str, Any] = {"response_headers": [], "error": None, "body_expires_at": None}
        # A record with a reference is left as one that never had a body.
        marked = records.filter(response_reference=None).update(response_body=BODY_GONE, **gone)
        return marked + records.update(response_body=None, **gone)

    def _delete_steps(self, accounts: dict[int, str]) -> None:
        # The index is over account and record. As an expression, the record keeps the planner from looking up every
        # pair of one of the accounts and one of the records. SQLite needs a minute for a large batch then.
        record = ExpressionWrapper(F("record_id") + 0, output_field=BigIntegerField())
        steps = IdempotencyStep.objects.using(self.using).filter(account_id__in=set(accounts.values()))
        steps.alias(record=record).filter(record__in=list(accounts)).delete()


class PortableStore(PortablePurge):
    """Any database. The changes of a record are the same compare-and-sets as PostgreSQL's."""

    # Claims

    def insert_claim(
        self, scope: Scope, request_hash: str, *, lease: timedelta, ttl: timedelta, wait_for_disk: bool
    ) -> int | None:
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
        records = IdempotencyRecord.objects.using(self.using).filter(
            account_id=scope.account_id, operation=scope.operation, idempotency_key=scope.idempotency_key
        )
        record = records.annotate(now=ExpressionWrapper(Now(), DateTimeField())).values().first()
        if record is None:
            return None
        now, lease_expires_at = record["now"], record["lease_expires_at"]
        status = status_of(record["status"])
        return Row(
            fence=Fence(scope, record["id"], record["attempt"], record["request_hash"]),
            status=status,
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

    def take_over(self, observed: Fence, *, lease: timedelta, ttl: timedelta) -> bool:
        claimable = Q(status=Status.RECOVERABLE) | Q(status=Status.IN_PROGRESS, lease_expires_at__lte=Now())
        return self._change_one(
            self._matching(observed).filter(claimable),
            status=Status.IN_PROGRESS,
            attempt=F("attempt") + 1,
            lease_expires_at=_from_now(lease),
            expires_at=Greatest("expires_at", _from_now(ttl)),
        )

    def start_over(self, observed: Fence, request_hash: str, *, lease: timedelta, ttl: timedelta) -> bool:
        live = Q(status=Status.IN_PROGRESS, lease_expires_at__gt=Now())
        return self._change_one(
            self._matching(observed).filter(~live, expires_at__lte=Now()),
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

    def park_abandoned(self, observed: Fence) -> bool:
        abandoned = self._matching(observed, status=Status.IN_PROGRESS, lease_expires_at__lte=Now())
        return self._change_one(abandoned, status=Status.PARKED, lease_expires_at=None)

    def complete(self, fence: Fence, outcome: Outcome, *, ttl: timedelta, commit: bool = False) -> bool:
        end_of_body = {} if outcome.body_ttl is None else {"body_expires_at": _from_now(outcome.body_ttl)}
        return self._change_one(
            self._matching(fence, status=Status.IN_PROGRESS),
            status=Status.COMPLETED,
            completed_at=Now(),
            lease_expires_at=None,
            expires_at=Greatest("expires_at", _from_now(ttl)),
            response_status=outcome.status,
            response_headers=outcome.headers,
            response_body=outcome.body,
            response_reference=outcome.reference,
            **end_of_body,
        )

    def set_lease(self, fence: Fence, duration: timedelta, *, ttl: timedelta) -> bool:
        return self._change_one(
            self._matching(fence, status=Status.IN_PROGRESS),
            lease_expires_at=_from_now(duration),
            expires_at=Greatest("expires_at", _from_now(ttl)),
        )

    def release(self, fence: Fence, error: str | None = None) -> bool:
        return self._end(fence, Status.RECOVERABLE, error)

    def park(self, fence: Fence, error: str | None = None) -> bool:
        return self._end(fence, Status.PARKED, error)

    def _end(self, fence: Fence, status: Status, error: str | None) -> bool:
        known: dict[str, Any] = {} if error is None else {"error": error}
        return self._change_one(
            self._matching(fence, status=Status.IN_PROGRESS), status=status, lease_expires_at=None, **known
        )

    # Transactions

    def commit_at_once(self) -> None:
        """Do nothing: SQLite has no round trips to save, and the others may need them for autocommit."""

    def bound_transaction(
        self,
        *,
        idle: timedelta,
        statement: timedelta | None = None,
        wait_for_disk: bool = True,
    ) -> None:
        """Do nothing: neither SQLite nor MySQL has such limits for one transaction."""

    def watch_transaction(self) -> TransactionWatch:
        return TransactionWatch(self.connection, lambda driver: True)  # the driver doesn't tell

    # The outbox and the counters

    def insert_message(self, message: OutboxMessage, delay: timedelta) -> bool:
        if delay:
            message.next_try_at = Now() + delay
        try:
            with transaction.atomic(using=self.using):  # a savepoint, so that an error leaves the transaction usable
                message.save(using=self.using, force_insert=True)
        except IntegrityError:
            return False
        if delay:
            message.refresh_from_db(using=self.using, fields=["next_try_at"])
        return True

    def add_counts(self, counts: Mapping[tuple[str, str], int], hour: int) -> None:
        # The database's settings decide how long to wait for a lock.
        model: Any = apps.get_model("idempotency_dashboard", "IdempotencyCounter")
        counters = model.objects.using(self.using)
        # In one order, so that no two processes can deadlock.
        for place, ((operation, event), count) in product((0, hour), sorted(counts.items())):
            one = {"hour": place, "operation": operation, "event": event}
            counter = counters.filter(**one)
            if not counter.update(total=F("total") + count):
                # Two processes may get here at the same time. One of them creates the counter, and both add to it.
                counters.bulk_create([model(**one)], ignore_conflicts=True)
                counter.update(total=F("total") + count)

    # What an error of the database means

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
        return rows.update(**changes) == 1

    def _matching(self, fence: Fence, **state: Any) -> QuerySet[IdempotencyRecord]:
        return IdempotencyRecord.objects.using(self.using).filter(
            account_id=fence.scope.account_id,
            operation=fence.scope.operation,
            idempotency_key=fence.scope.idempotency_key,
            id=fence.id,
            attempt=fence.attempt,
            request_hash=fence.request_hash,
            **state,
        )


class SQLiteStore(PortableStore):
    """SQLite: one writer at a time. Errors are known by their text, because Django's have no code of SQLite's."""

    has_one_writer = True

    def watch_transaction(self) -> TransactionWatch:
        return TransactionWatch(self.connection, attrgetter("in_transaction"))

    def is_busy(self, error: BaseException) -> bool:
        return "is locked" in str(error) or super().is_busy(error)

    def is_permanent(self, error: BaseException) -> bool:
        text = str(error)
        schema = text.startswith("no such ") or "has no column named" in text
        return schema if isinstance(error, OperationalError) else text.startswith("NOT NULL constraint failed")

    def is_duplicate(self, error: BaseException) -> bool:
        return str(error).startswith("UNIQUE constraint failed")


def _from_now(duration: timedelta) -> ExpressionWrapper[Any]:
    return ExpressionWrapper(Now() + Value(duration), output_field=DateTimeField())
