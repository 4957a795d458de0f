"""What stores give and take, and ``Upkeep``: the part of a store that purges, sweeps and checks use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, TypeVar

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import BigIntegerField, ExpressionWrapper, F, QuerySet

from ..exceptions import UnavailableError
from ..identity.scope import Scope
from ..lifecycle import Status
from ..models import IdempotencyRecord, IdempotencyStep, RecordQuerySet
from ..outcome import BODY_GONE, Outcome

logger: Final = logging.getLogger("idempotency")

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Fence:
    """What a change of a record must still match: one attempt of one request."""

    scope: Scope
    id: int
    attempt: int
    request_hash: str = field(repr=False)

    @classmethod
    def of(cls, record: IdempotencyRecord) -> Fence:
        """The fence of a record as it was read."""
        return cls(record.scope, record.pk, record.attempt, record.request_hash)


@dataclass(frozen=True)
class Row:
    """A record as read by a request that lost the claim. Its times are compared by the database's clock."""

    #: What a change must match, so that it changes the record only as it was read.
    fence: Fence
    status: Status
    lease_left: float  # seconds; 0 or less if the lease is over or there is none
    session: int | None  # in which the handler of the latest claim runs, if its end may end the lease
    retention_over: bool
    outcome: Outcome | None  # for a completed record only


def newer_record(what: str) -> UnavailableError:
    """The error for a record that this release can't understand. A retry may meet a process of the newer release.

    :param what: what is unknown, for the log.
    """
    logger.error(
        "A record has %s, which this release doesn't know. A newer release wrote it. Nothing was run, and the client "
        "is asked to retry. Finish the deploy, or deploy the newer release again.",
        what,
    )
    return UnavailableError(retry_after=1)


@dataclass(frozen=True)
class Taken:
    """What a batch of a purge has taken of the oldest rows that are due."""

    changed: int
    #: How many rows were due and free. Fewer than the batch may take: nothing more is due, or others hold the rest.
    found: int
    #: When the last of them became due. The next batch starts there. None if the batch found no row.
    reached: datetime | None


@dataclass(frozen=True)
class TableSize:
    """The size of the table of records, as far as the database can tell without reading it."""

    in_bytes: int | None  # with its indexes
    records: int | None  # an estimate


@dataclass(frozen=True)
class Replication:
    """What a COMMIT waits for."""

    #: The server's setting ``synchronous_commit``, as this session has it.
    synchronous_commit: str
    #: Whether the server names standbys that COMMIT waits for.
    is_synchronous: bool
    #: How many standbys it doesn't wait for, as far as this role may see.
    asynchronous_standbys: int


@dataclass(eq=False)
class CommitError(Exception):
    """A COMMIT that a store has sent itself has failed, or its answer was lost."""

    error: Exception
    """What the database or the driver has raised."""


class Upkeep:
    """One of Django's connections, which belongs to one thread, and the upkeep of the records over it.

    A purge's SELECT locks the oldest rows that are due and free. Statements by their ids follow. SQLite locks nothing:
    there all see one snapshot, and a transaction that writes after another one has written is refused.
    """

    #: Whether the database could not be asked which store is its own.
    is_provisional = False

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.connection = connection
        self.using: str = connection.alias

    @property
    def is_nested(self) -> bool:
        """Whether the open transaction is a savepoint of the one that TestCase wraps a test in."""
        return bool(self.connection.savepoint_ids)

    def row_of(self, query: str, parameters: Sequence[Any] | None = None) -> Any:
        """The first row of a query's result, or None."""
        with self.connection.cursor() as cursor:
            cursor.execute(query, parameters)
            return cursor.fetchone()

    def select_unlocked(self, rows: QuerySet[Any, _Found], limit: int | None = None) -> list[_Found]:
        """Fetch rows and lock them, without those that others have locked. If a database can't skip them, lock none."""
        if self.connection.features.has_select_for_update_skip_locked:
            rows = rows.select_for_update(skip_locked=True)
        return list(rows[:limit])

    def lock_found(
        self,
        rows: QuerySet[Any, _Found],
        limit: int | None,
        columns: Sequence[str],
        lock: Callable[[list[tuple[Any, ...]]], list[_Found]],
    ) -> list[_Found]:
        """Find rows, and then lock them by another statement. If others have locked some of them, look further.

        :param columns: what ``lock`` needs of each row, the primary key first.
        :returns: fewer rows than ``limit`` only if no more are free.
        """
        locked: list[_Found] = []
        seen: list[Any] = []
        while True:
            wanted = None if limit is None else limit - len(locked)
            found = list(rows.exclude(pk__in=seen).values_list(*columns)[:wanted])
            locked += lock(found)
            if wanted is None or len(found) < wanted or len(locked) == limit:
                return locked
            seen += [pk for pk, *_ in found]

    def delete_records(self, statuses: Collection[Status], limit: int, after: datetime | None) -> Taken:
        """Delete the oldest records past their retention, with their steps, without rows that others have locked.

        :param statuses: only records in one of these states are deleted.
        :param limit: how many rows to take at most.
        :param after: skip rows that became due before this time; None begins with the oldest.
        """
        due = RecordQuerySet(IdempotencyRecord, using=self.using).past_retention().filter(status__in=statuses)
        return self._change_oldest(due, "expires_at", limit, after, self._delete_with_steps)

    def delete_bodies(self, limit: int, after: datetime | None) -> Taken:
        """Delete the oldest responses that are kept no longer, and what may tell the same: headers, errors, steps.

        The record stays, with its status, its reference and ``BODY_GONE`` in the place of the body.
        """
        due = RecordQuerySet(IdempotencyRecord, using=self.using).with_body_past_retention()
        return self._change_oldest(due, "body_expires_at", limit, after, self._delete_bodies)

    def delete_rows(self, due: QuerySet[Any], due_at: str, limit: int, after: datetime | None) -> Taken:
        """Delete the oldest rows of ``due``, which became due at the time in the field ``due_at``."""
        return self._change_oldest(due, due_at, limit, after, lambda rows, accounts: rows.delete()[0])

    def _change_oldest(
        self,
        due: QuerySet[Any],
        due_at: str,
        limit: int,
        after: datetime | None,
        change: Callable[[QuerySet[Any], dict[int, str]], int],
    ) -> Taken:
        """Change the oldest rows of ``due`` by ``change``, which gets some of them at a time, and returns a number."""
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
        # The type is that of the ids. Django takes the sum for one of 32 bits, and where the server binds parameters,
        # psycopg sends it so.
        record = ExpressionWrapper(F("record_id") + 0, output_field=BigIntegerField())
        steps = IdempotencyStep.objects.using(self.using).filter(account_id__in=set(accounts.values()))
        steps.alias(record=record).filter(record__in=list(accounts)).delete()

    def end_leases_of_gone_sessions(self, limit: int) -> None:
        """End up to ``limit`` leases whose claims' sessions are gone: see ``Store.end_lease_of_gone_session``."""

    def measure(self) -> TableSize:
        """The size of the table of records, if the database need not read the table for that."""
        return TableSize(None, None)

    def tables_outside_of_citus(self) -> list[str]:
        """In a cluster of Citus, the project's tables that it doesn't know: see ``idempotency.W014``."""
        return []

    def replication(self) -> Replication | None:
        """What a COMMIT waits for, or None if the database doesn't say."""
        return None

    def identity(self) -> tuple[Any, ...]:
        """What no other database has, by whichever way it is reached."""
        return (str(self.connection.settings_dict["NAME"]),)

    def is_pooled(self) -> bool:
        """Whether there is a pooler between this process and the server. False if the database doesn't say."""
        return False
