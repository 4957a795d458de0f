"""``Store``: the interface to a database.

A method for claims that returns a bool is a compare-and-set: True means that one row matched and was changed. Methods
don't commit, with two exceptions: ``complete(commit=True)``, and a statement after ``commit_at_once``, which may be
committed when it returns. Each method is called in a transaction that the package has opened, so that its settings (how
long to wait for a lock, how long to be idle) end with the transaction. Two methods differ: ``insert_message`` has no
settings and is called in the caller's transaction, and ``measure`` in any transaction or none. In a TestCase the
transaction is a savepoint of the test's transaction. Nothing is set there, because the settings would stay in force
after the savepoint.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet

from ..exceptions import UnavailableError
from ..identity.scope import Scope
from ..lifecycle import Status
from ..outcome import Outcome
from .transaction_guard import TransactionWatch

if TYPE_CHECKING:
    from ..outbox.models import OutboxMessage

logger = logging.getLogger("idempotency")

_Found = TypeVar("_Found")

#: With these SQLSTATE classes a server may answer a COMMIT although it succeeded: connection exception, operator
#: intervention (the server was told to stop), system error, internal error.
UNDECIDED_CLASSES = ("08", "57P", "58", "XX")


@dataclass(frozen=True)
class Fence:
    """What a change of a record must still match: one attempt of one request."""

    scope: Scope
    id: int
    attempt: int
    request_hash: str = field(repr=False)


@dataclass(frozen=True)
class Row:
    """A record as read by a request that lost the claim. Its times are compared by the database's clock."""

    #: What a change must match, so that it changes the record only as it was read.
    fence: Fence
    status: Status
    lease_left: float  # seconds; 0 or less if the lease is over or there is none
    retention_over: bool
    outcome: Outcome | None = field(repr=False)  # for a completed record only


def status_of(stored: str) -> Status:
    """The state of a record, from its column.

    :raises UnavailableError: this release doesn't know it.
    """
    try:
        return Status(stored)
    except ValueError:
        raise newer_record(f"the status {stored!r}") from None


def newer_record(what: str) -> UnavailableError:
    """Make the error for a record that this release can't understand.

    While a deploy is under way, a retry may meet a process of the newer release. So the client is asked to retry. Any
    other answer would tell it something about the operation that this release doesn't know.

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

    in_bytes: int | None = None  # with its indexes
    records: int | None = None  # an estimate


@dataclass(frozen=True)
class Replication:
    """What a COMMIT waits for."""

    #: The server's setting ``synchronous_commit``, as this session has it.
    synchronous_commit: str
    #: Whether the server names standbys that COMMIT waits for.
    is_synchronous: bool
    #: How many standbys it doesn't wait for, as far as this role may see.
    asynchronous_standbys: int


class CommitError(Exception):
    """A COMMIT that a store has sent itself has failed, or its answer was lost.

    :param error: what the database or the driver has raised.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Store(ABC):
    """The statements of one database, over one of Django's connections, which belongs to one thread."""

    #: Whether an open transaction that has written keeps every other connection from writing.
    has_one_writer = False

    def __init__(self, connection: BaseDatabaseWrapper, *, is_provisional: bool = False) -> None:
        self.connection = connection
        #: Whether the database could not be asked which store is its own.
        self.is_provisional = is_provisional
        self.using: str = connection.alias

    @property
    def is_nested(self) -> bool:
        """Whether the open transaction is a savepoint of the one that TestCase wraps a test in."""
        return bool(self.connection.savepoint_ids)

    # Claims

    @abstractmethod
    def insert_claim(
        self, scope: Scope, request_hash: str, *, lease: timedelta, ttl: timedelta, wait_for_disk: bool
    ) -> int | Row | None:
        """Insert the record of a first attempt.

        :param wait_for_disk: False lets COMMIT return before the record is on disk, if the database can do that.
        :returns: the record's id. If the scope has a record already, that record, or None if it was not read.
        :raises IntegrityError: the scope has a record already, and the database reports that by an error.
        """

    @abstractmethod
    def read(self, scope: Scope) -> Row | None:
        """The record of the scope, or None if there is none."""

    @abstractmethod
    def take_over(self, observed: Fence, *, lease: timedelta, ttl: timedelta) -> bool:
        """Own the record if it is as it was observed, and recoverable or abandoned."""

    @abstractmethod
    def start_over(self, observed: Fence, request_hash: str, *, lease: timedelta, ttl: timedelta) -> bool:
        """Own the record for a new request if it is as it was observed, its retention is over and no lease is
        running."""

    @abstractmethod
    def park_abandoned(self, observed: Fence) -> bool:
        """Park the record if it is as it was observed, and in progress with its lease over."""

    @abstractmethod
    def set_lease(self, fence: Fence, duration: timedelta, *, ttl: timedelta) -> bool:
        """Let the claim's lease end ``duration`` from now."""

    @abstractmethod
    def complete(self, fence: Fence, outcome: Outcome, *, ttl: timedelta, commit: bool = False) -> bool:
        """Record the outcome. The retention then ends ``ttl`` from now, or later if it was longer already.

        :param commit: commit the open transaction, too, if the database does both in one message. Only for the last
            statement of a transaction, whose COMMIT the caller then sends. It finds nothing to do if the transaction is
            committed.
        :raises CommitError: COMMIT was sent along, and it has failed, or it is not known how it ended.
        """

    @abstractmethod
    def release(self, fence: Fence, error: str | None = None) -> bool:
        """Give the claim up, so that a retry may run at once.

        :param error: why the attempt failed. None keeps what is known of an earlier one.
        """

    @abstractmethod
    def park(self, fence: Fence, error: str | None = None) -> bool:
        """Park the record, so that nothing runs until somebody has found out how the attempt ended.

        :param error: as for ``release``.
        """

    # Transactions

    @abstractmethod
    def commit_at_once(self) -> None:
        """Let the next statement be the whole of the open transaction, of which nothing has been sent yet.

        If the database commits a single statement by itself, this saves two round trips. The statement is then
        committed when it returns, and not at the end of the transaction's block.
        """

    @abstractmethod
    def bound_transaction(
        self,
        *,
        idle: timedelta,
        statement: timedelta | None = None,
        wait_for_disk: bool = True,
    ) -> None:
        """Set limits after which the database ends the open transaction, if it can do that.

        :param idle: how long the transaction may wait for its client's next statement.
        :param statement: how long any further statement in it may run; None sets no bound.
        :param wait_for_disk: False lets its COMMIT not wait, so that a crash of the server may lose it.
        """

    def select_unlocked(self, rows: QuerySet[Any, _Found], limit: int | None = None) -> list[_Found]:
        """Fetch rows and lock them. Rows that another transaction has locked are left out.

        A database that can't skip locked rows locks none.
        """
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
        """Find rows, and then lock them by a statement of their own, for ``select_unlocked()``.

        If others have locked some of them, this looks further, as a statement that does both would. To a caller, fewer
        rows than ``limit`` mean that no more are free.

        :param columns: what ``lock`` needs of each row, the primary key first.
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

    @abstractmethod
    def watch_transaction(self) -> TransactionWatch:
        """Detect whether code in the block ends the open transaction by a COMMIT or ROLLBACK that bypasses Django."""

    # Maintenance

    @abstractmethod
    def delete_records(self, statuses: Collection[Status], limit: int, after: datetime | None) -> Taken:
        """Delete the oldest records past their retention, with their steps.

        This method and the next two leave out rows that other transactions have locked.

        :param statuses: only records in one of these states are deleted.
        :param limit: how many rows to take at most.
        :param after: skip rows that became due before this time; None begins with the oldest.
        """

    @abstractmethod
    def delete_bodies(self, limit: int, after: datetime | None) -> Taken:
        """Delete the oldest recorded responses that are kept no longer.

        The record stays, with its status, its reference and ``BODY_GONE`` in the place of the body. Headers, the last
        error and the results of steps are deleted, because they may tell what the body tells.
        """

    @abstractmethod
    def delete_rows(self, due: QuerySet[Any], due_at: str, limit: int, after: datetime | None) -> Taken:
        """Delete the oldest rows of ``due``.

        :param due_at: the field that says when a row became due.
        """

    @abstractmethod
    def add_counts(self, counts: Mapping[tuple[str, str], int], hour: int) -> None:
        """Add to the counters of each (operation, event): to that of the hour, and to that of all hours, which is 0.

        Missing counters are created.
        """

    def measure(self) -> TableSize:
        """The size of the table of records. It is unknown if the database would have to read the table."""
        return TableSize()

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

    # The outbox

    @abstractmethod
    def insert_message(self, message: OutboxMessage, delay: timedelta) -> bool:
        """Insert the message and set the values that the database has made.

        :param delay: how long from now the message is kept back.
        :returns: False if there is a message with its id already. The transaction stays usable.
        """

    # What an error of the database means

    @abstractmethod
    def is_duplicate(self, error: BaseException) -> bool:
        """Whether the insert of a claim was refused because its scope has a record already."""

    @abstractmethod
    def lost_a_race(self, error: BaseException) -> bool:
        """Whether the transaction was refused because of another one. Another try may succeed."""

    @abstractmethod
    def timed_out_waiting(self, error: BaseException) -> bool:
        """Whether another transaction holds the row's lock."""

    def is_busy(self, error: BaseException) -> bool:
        """Whether the transaction was undone because of another one, so that it may succeed later."""
        return self.lost_a_race(error) or self.timed_out_waiting(error)

    @abstractmethod
    def was_broken_before(self, error: BaseException) -> bool:
        """Whether the statement was ignored because an earlier one had failed in its transaction."""

    @abstractmethod
    def commit_was_refused(self, error: BaseException) -> bool:
        """Whether the database has reported a rollback. After any other error, the COMMIT may have succeeded."""

    @abstractmethod
    def is_permanent(self, error: BaseException) -> bool:
        """Whether the same statement fails again until somebody changes the schema, a permission or the code."""
