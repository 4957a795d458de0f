"""The types in a store's interface, and ``Upkeep``: the part of a store that purges, sweeps and checks use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import reduce
from operator import or_
from typing import Any, Final, TypeVar

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import BooleanField, Func, Q, QuerySet

from ..bodies import BODY_GONE
from ..exceptions import UnavailableError
from ..identity.scope import Scope
from ..lifecycle import Status
from ..models import BODY_DUE, IdempotencyRecord, IdempotencyStep, Now
from ..outcome import Outcome

logger: Final = logging.getLogger("idempotency")

_Found = TypeVar("_Found")

#: A statement names this many accounts with their records. SQLite limits the depth of a condition to 1,000.
MAX_ACCOUNTS: Final = 100


@dataclass(frozen=True)
class Fence:
    """The condition on every change of a record: it is still at this attempt of this request."""

    scope: Scope
    id: int
    attempt: int
    request_hash: str = field(repr=False)

    @classmethod
    def of(cls, record: IdempotencyRecord) -> Fence:
        """The fence for a record as it was read."""
        return cls(record.scope, record.pk, record.attempt, record.request_hash)


@dataclass(frozen=True)
class Row:
    """A record as read by a request that lost the claim. Its times are relative to the database's clock."""

    #: A change must match this, so that it applies only to the record as it was read.
    fence: Fence
    status: Status
    lease_left: float  # seconds; 0 or less if there is no lease or it has ended
    session: int | None  # in which the latest claim's handler runs, if the end of the session may end the lease
    retention_over: bool
    outcome: Outcome | None  # for a completed record only


def newer_record(what: str) -> UnavailableError:
    """The error for a record that this release can't interpret. A retry may reach a process of the newer release.

    :param what: the unknown part, for the log.
    """
    logger.error(
        "A record has %s, which this release doesn't know. A newer release wrote it. Nothing was run, and the client "
        "gets a 503 with Retry-After. Finish the deploy, or deploy the newer release again.",
        what,
    )
    return UnavailableError(retry_after=1)


@dataclass(frozen=True)
class PurgedRows:
    """The result of one purge batch over the oldest due rows."""

    changed: int
    #: How many due rows were free. If fewer than the limit, no more rows are due, or others hold the rest.
    found: int
    #: When the last of them became due. The next batch starts there. None if no row was found.
    reached: datetime | None


@dataclass(frozen=True)
class TableSize:
    """The size of the records table, as far as the database knows it without reading the table."""

    in_bytes: int | None  # with its indexes
    records: int | None  # an estimate


@dataclass(frozen=True)
class Replication:
    """What a COMMIT waits for."""

    #: The value of ``synchronous_commit`` in this session.
    synchronous_commit: str
    #: Whether the server is configured to wait for standbys.
    is_synchronous: bool
    #: How many standbys it doesn't wait for, as far as this role can see.
    asynchronous_standbys: int


@dataclass(eq=False)
class CommitError(Exception):
    """A COMMIT that the store itself sent failed, or its answer was lost."""

    error: Exception
    """The error from the database or the driver."""


class IsTrue(Func):
    """A condition that no index serves, on any database."""

    template = "(%(expressions)s) IS TRUE"
    output_field = BooleanField()


def by_ids(ids: Collection[int], condition: Q) -> Q:
    """The condition of a statement that finds rows by their ids and changes those that still meet ``condition``.

    Every statement by ids is built with it. It names the ids once: for two lists of ids, PostgreSQL plans a search for
    each pair and prefers to read the table. Of ``condition`` it lets no index be used: the index would find all rows
    that are due, or all of an account, for every batch.
    """
    return Q(IsTrue(condition), pk__in=ids)


class Upkeep:
    """The upkeep of the records over one of Django's connections, which belongs to one thread.

    A purge's SELECT locks the oldest due rows that are free, and statements by id follow. SQLite locks nothing: its
    statements see one snapshot, and a transaction that writes after another one has written is refused.
    """

    #: Whether this store is a guess, because the database could not be queried.
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

    def select_unlocked(
        self,
        rows: QuerySet[Any, _Found],
        limit: int | None = None,
        *,
        condition: Q = Q(),  # noqa: B008 - it is never changed
    ) -> list[_Found]:
        """Fetch and lock the rows that meet a condition, skipping those that others have locked.

        Locks none if the database can't skip.
        """
        rows = rows.filter(condition)
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
        """Find rows, then lock them with another statement. If others have locked some of them, search further.

        :param columns: the columns that ``lock`` needs, the primary key first.
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

    def delete_records(self, statuses: Collection[Status], limit: int, after: datetime | None) -> PurgedRows:
        """Delete the oldest records past their retention, with their steps. Skips rows that others have locked.

        :param statuses: delete only records in these states.
        :param limit: the maximum number of rows.
        :param after: skip rows that became due before this time; None starts with the oldest.
        """
        due = ~Q(status=Status.IN_PROGRESS) & Q(status__in=statuses, expires_at__lte=Now())
        records = IdempotencyRecord.objects.using(self.using)
        return self._change_oldest(records, due, "expires_at", limit, after, self._delete_with_steps)

    def delete_bodies(self, limit: int, after: datetime | None) -> PurgedRows:
        """Delete the oldest responses past their retention, and what may reveal them: headers, errors and steps.

        The record keeps its status and its reference. ``BODY_GONE`` replaces the body. Leaves the responses of records
        that are due themselves, because a purge deletes those as a whole.
        """
        records = IdempotencyRecord.objects.using(self.using)
        return self._change_oldest(records, BODY_DUE, "body_expires_at", limit, after, self._delete_bodies)

    def delete_rows(self, rows: QuerySet[Any], due: Q, due_at: str, limit: int, after: datetime | None) -> PurgedRows:
        """Delete the oldest rows that meet ``due``, which became due at the time in the field ``due_at``."""
        return self._change_oldest(rows, due, due_at, limit, after, lambda batch, accounts: batch.delete()[0])

    def _change_oldest(
        self,
        rows: QuerySet[Any],
        due: Q,
        due_at: str,
        limit: int,
        after: datetime | None,
        change: Callable[[QuerySet[Any], dict[int, str]], int],
    ) -> PurgedRows:
        """Apply ``change`` to the oldest rows that meet ``due``, in groups. It returns how many rows it changed."""
        oldest = due if after is None else due & Q(**{f"{due_at}__gte": after})
        columns = rows.order_by(due_at).values_list("pk", "account_id", due_at)
        found = self.select_unlocked(columns, limit, condition=oldest)
        # A statement takes a bounded number of parameters, and names each row at most twice. On SQLite the bound is
        # low, so this leaves room for the parameters of the conditions.
        step = max(1, self.connection.ops.bulk_batch_size([rows.model._meta.pk] * 3, found))
        changed = 0
        for start in range(0, len(found), step):
            accounts = {pk: account for pk, account, _ in found[start : start + step]}
            # Repeat the conditions for a database that neither locks the rows nor reads from a snapshot.
            changed += change(rows.filter(by_ids(list(accounts), due)), accounts)
        return PurgedRows(changed, len(found), max((moment for *_, moment in found), default=None))

    def _delete_with_steps(self, records: QuerySet[Any], accounts: dict[int, str]) -> int:
        self._delete_steps(accounts)
        return records.delete()[0]

    def _delete_bodies(self, records: QuerySet[Any], accounts: dict[int, str]) -> int:
        self._delete_steps(accounts)
        gone: dict[str, Any] = {"response_headers": [], "error": None, "body_expires_at": None}
        # A record with a reference becomes one that never had a body.
        marked = records.filter(response_reference=None).update(response_body=BODY_GONE, **gone)
        return marked + records.update(response_body=None, **gone)

    def _delete_steps(self, accounts: dict[int, str]) -> None:
        records: dict[str, list[int]] = {}
        for pk, account in accounts.items():
            records.setdefault(account, []).append(pk)
        # The index is on account and record. With one list of each, a database looks up every combination, or reads all
        # steps of the accounts.
        scopes = [Q(account_id=account, record_id__in=ids) for account, ids in records.items()]
        for start in range(0, len(scopes), MAX_ACCOUNTS):
            IdempotencyStep.objects.using(self.using).filter(reduce(or_, scopes[start : start + MAX_ACCOUNTS])).delete()

    def end_leases_of_gone_sessions(self, operations: Collection[str], limit: int) -> None:
        """End up to ``limit`` leases of these operations whose sessions are gone.

        See ``Store.end_lease_of_gone_session``.
        """

    def measure(self) -> TableSize:
        """The size of the records table, if the database knows it without reading the table."""
        return TableSize(None, None)

    def tables_outside_of_citus(self) -> list[str]:
        """The project's tables that a Citus cluster doesn't manage. See ``idempotency.W014``."""
        return []

    def replication(self) -> Replication | None:
        """What a COMMIT waits for, or None if the database doesn't report it."""
        return None

    def identity(self) -> tuple[Any, ...]:
        """Identifies the database, whichever connection settings reach it."""
        return (str(self.connection.settings_dict["NAME"]),)

    def is_pooled(self) -> bool:
        """Whether a pooler is between this process and the server. False if that can't be detected."""
        return False
