"""``Store``: what the package asks of a database.

A method on claims that answers with a bool is a compare-and-set: True says that one row matched and was changed. No
method commits. Each is called in a transaction that the package has opened, so that what is set for it (how long to
wait for a lock, how long to be idle) ends with it; ``insert_message``, which sets nothing, is called in the caller's
transaction, and ``measure`` in any or none. In the tests of a project the transaction is a savepoint of the test's own;
nothing is set there, because it would outlast the statement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..identity.scope import Scope
from ..lifecycle import Status
from ..outcome import Outcome
from .watch import TransactionWatch

if TYPE_CHECKING:
    from ..models import OutboxMessage

#: SQLSTATE classes with which a server may answer a COMMIT that it has carried out all the same: connection exception,
#: operator intervention (the server was told to stop), system error, internal error.
UNDECIDED_CLASSES = ("08", "57P", "58", "XX")


@dataclass(frozen=True)
class Fence:
    """What a change of an owned record must still match."""

    scope: Scope
    id: int
    attempt: int
    request_hash: str = field(repr=False)


@dataclass(frozen=True)
class Row:
    """A record as a request finds it that didn't win the claim. The database's clock has judged its times."""

    id: int
    attempt: int
    status: Status
    request_hash: str = field(repr=False)
    lease_left: float  # seconds; 0 or less when the lease is over, or there is none
    retention_over: bool
    outcome: Outcome | None = field(repr=False)  # of a completed record

    @property
    def lease_over(self) -> bool:
        return self.lease_left <= 0


@dataclass(frozen=True)
class DeletedBatch:
    """What one batch of a purge came to."""

    deleted: int
    exhausted: bool  # fewer records were found than the batch may hold
    reached: datetime | None  # when the last record of the batch fell due; None if the batch found none


@dataclass(frozen=True)
class TableSize:
    """How big the table of records is, as far as the database can say without reading it."""

    in_bytes: int | None = None  # with its indexes
    records: int | None = None  # an estimate


class Store(ABC):
    """The statements of one database alias."""

    #: Whether an open transaction that has written keeps every other connection from writing.
    has_one_writer = False

    def __init__(self, using: str) -> None:
        self.using = using

    @property
    def connection(self) -> BaseDatabaseWrapper:
        """This thread's connection."""
        return connections[self.using]

    @property
    def is_nested(self) -> bool:
        """Whether the open transaction is a savepoint of the one that TestCase wraps a test in."""
        return bool(self.connection.savepoint_ids)

    # Claims

    @abstractmethod
    def insert_claim(
        self, scope: Scope, request_hash: str, *, lease: timedelta, ttl: timedelta, wait_for_disk: bool
    ) -> int | None:
        """Insert the record of a first attempt.

        :param wait_for_disk: False lets COMMIT return before the record is on disk, where the database can.
        :returns: the record's id, or None where the scope has a record already.
        :raises IntegrityError: the scope has a record already, and the database can't say so without an error.
        """

    @abstractmethod
    def read(self, scope: Scope) -> Row | None:
        """The record of the scope, or None where there is none."""

    @abstractmethod
    def take_over(self, scope: Scope, row: Row, *, lease: timedelta, ttl: timedelta) -> bool:
        """Own the record as ``row`` was read, if it is released, or in progress with its lease over, still."""

    @abstractmethod
    def start_over(self, scope: Scope, row: Row, request_hash: str, *, lease: timedelta, ttl: timedelta) -> bool:
        """Own the record as ``row`` was read for a new request, if its retention is over and no lease runs."""

    @abstractmethod
    def park_abandoned(self, scope: Scope, row: Row) -> bool:
        """Park the record as ``row`` was read, if it is in progress with its lease over, still."""

    @abstractmethod
    def set_lease(self, fence: Fence, duration: timedelta, *, ttl: timedelta) -> bool:
        """Let the claim's lease end ``duration`` from now."""

    @abstractmethod
    def complete(self, fence: Fence, outcome: Outcome, *, ttl: timedelta) -> bool:
        """Record the outcome. Retention ends ``ttl`` from now, or later if it did already."""

    @abstractmethod
    def release(self, fence: Fence) -> bool:
        """Give the claim up: a retry may run at once."""

    @abstractmethod
    def park(self, fence: Fence) -> bool:
        """Give the claim up: nothing may run until somebody has found out how the attempt ended."""

    # Transactions

    @abstractmethod
    def one_statement(self) -> AbstractContextManager[None]:
        """Let the block's one statement be the whole of the transaction that is open and has sent nothing yet.

        A database for which a single statement is a transaction anyway saves two round trips. The statement is
        committed when it returns, and not at the end of the transaction's block.
        """

    @abstractmethod
    def bound_transaction(self, *, idle: timedelta, statement: timedelta | None = None) -> None:
        """Let the database end the open transaction, where it can.

        :param idle: how long the transaction may wait for its client's next statement.
        :param statement: how long any further statement in it may run; None sets no bound.
        """

    @abstractmethod
    def watch_transaction(self) -> AbstractContextManager[TransactionWatch]:
        """Notice during the block that the open transaction is ended by a COMMIT or ROLLBACK that goes past Django."""

    # Maintenance

    @abstractmethod
    def delete_due(self, statuses: Collection[Status], limit: int, after: datetime | None) -> DeletedBatch:
        """Delete records whose retention is over, oldest first, with their steps. Rows that are locked are passed over.

        :param statuses: only records in one of these are deleted.
        :param limit: how many records to delete at most.
        :param after: passes over what fell due before it; None begins with the oldest.
        """

    @abstractmethod
    def add_counts(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Add to the counter of each (operation, event), and make those that aren't there."""

    def measure(self) -> TableSize:
        """The size of the table of records. A database that can't tell without reading it says nothing."""
        return TableSize()

    # The outbox

    @abstractmethod
    def insert_message(self, message: OutboxMessage, delay: timedelta) -> bool:
        """Insert the message and give it the values that the database made.

        :param delay: how long from now to keep it back.
        :returns: False, with the transaction as sound as before, where there is a message of its id.
        """

    # What an error of the database means

    @abstractmethod
    def is_duplicate(self, error: BaseException) -> bool:
        """Whether the insert of a claim was refused because its scope has a record already."""

    @abstractmethod
    def lost_a_race(self, error: BaseException) -> bool:
        """Whether the transaction was refused because of another one. The same again may succeed."""

    @abstractmethod
    def timed_out_waiting(self, error: BaseException) -> bool:
        """Whether another transaction holds the row's lock."""

    @abstractmethod
    def was_broken_before(self, error: BaseException) -> bool:
        """Whether the statement was ignored because an earlier one had failed in its transaction."""

    @abstractmethod
    def commit_was_refused(self, error: BaseException) -> bool:
        """Whether the database has said that it rolled back. Any other error out of COMMIT may hide a commit."""

    @abstractmethod
    def is_permanent(self, error: BaseException) -> bool:
        """Whether the same statement will fail again until somebody changes the schema, a permission or the code."""
