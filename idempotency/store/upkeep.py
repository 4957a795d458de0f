"""``Upkeep``: the statements on many records, for purges and sweeps, and the queries of statistics and system checks.

It uses Django's ORM, so it works on any database. A subclass overrides what its database does better.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import reduce
from importlib import import_module
from operator import or_
from typing import Any, Final, TypeVar

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import BooleanField, Func, Q, QuerySet

from ..bodies import BODY_GONE
from ..lifecycle import Status
from ..models import BODY_DUE, IdempotencyRecord, IdempotencyStep, Now
from .portable import Store, store_for

_Found = TypeVar("_Found")

#: A statement names this many accounts with their records. SQLite limits the depth of a condition to 1,000.
MAX_ACCOUNTS: Final = 100


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
    """What purges, sweeps, statistics and system checks need from a database, over the connection of its store.

    A purge's SELECT locks the oldest due rows that are free, and statements by id follow. SQLite locks nothing: its
    statements see one snapshot, and a transaction that writes after another one has written is refused.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.connection: BaseDatabaseWrapper = store.connection
        self.using: str = store.using

    def bound_transaction(
        self, *, idle: timedelta, statement: timedelta | None = None, wait_for_disk: bool = True
    ) -> None:
        """Set limits after which the database ends the open transaction, where supported.

        :param idle: how long the transaction may wait for its client's next statement.
        :param statement: how long a statement in it may run; None sets no limit.
        :param wait_for_disk: False means that a server crash may lose its COMMIT.
        """

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


#: For each vendor, the module in this folder and the name of the upkeep in it. Other vendors get the portable upkeep.
UPKEEPS = {"postgresql": ("postgresql", "choose_upkeep"), "mysql": ("mysql", "MySQLUpkeep")}


def upkeep_for(using: str) -> Upkeep:
    """The upkeep for the alias ``using``, over this thread's connection."""
    store = store_for(using)
    module, name = UPKEEPS.get(store.connection.vendor, ("upkeep", "Upkeep"))
    upkeep: Upkeep = getattr(import_module(f".{module}", __package__), name)(store)
    return upkeep
