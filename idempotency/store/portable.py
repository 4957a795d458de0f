"""``Store``: the statements of one database, over one of Django's connections.

It works on any database, with Django's ORM and the database's clock. SQLite's store differs little, so it is here, too.

A method that changes a record returns whether one row matched and was changed. It is called in ``own_statement()`` or
in a transaction of this package, so that its settings, such as how long to wait for a lock, end with the transaction.
Only ``complete(commit=True)`` commits by itself. In a TestCase the transaction is a savepoint, and nothing is set,
because the settings would outlive it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any

from django.db import Error, IntegrityError, OperationalError, ProgrammingError, connections, transaction
from django.db.models import F, Q, QuerySet
from django.db.models.expressions import Combinable
from django.db.models.functions import Greatest, Now

from ..exceptions import OuterTransactionError
from ..identity.scope import Scope
from ..lifecycle import Status
from ..models import IdempotencyRecord
from ..outcome import Outcome
from .base import Fence, Row, Upkeep, newer_record
from .history import Appended
from .transaction_guard import SQLiteWatch, TransactionWatch


def status_of(stored: str) -> Status:
    """The state of a record, from its column.

    :raises UnavailableError: this release doesn't know it.
    """
    try:
        return Status(stored)
    except ValueError:
        raise newer_record(f"the status {stored!r}") from None


_RESPONSE = ("response_status", "response_headers", "response_body", "response_reference")


class Store(Upkeep):
    """Any database. The changes of a record are the same compare-and-sets as PostgreSQL's."""

    #: Whether an open transaction that has written keeps every other connection from writing.
    has_one_writer = False

    @property
    def has_open_transaction(self) -> bool:
        """Whether the driver has a transaction open, also by a BEGIN that bypassed Django, or can't tell."""
        return True

    # Claims

    def insert_claim(
        self, scope: Scope, request_hash: str, *, lease: timedelta, retention: timedelta, undone_by_crash: bool
    ) -> int | Row | None:
        """Insert the record of a first attempt.

        :param undone_by_crash: whether a crash undoes the attempt's effects. Then a crash of the server may lose the
            COMMIT of the claim, and the end of its session may end its lease, if the database can do that.
        :returns: the record's id. If the scope has a record already, that record, or None if it was not read.
        :raises IntegrityError: the scope has a record already, and the database reports that by an error.
        """
        # Not INSERT IGNORE, because on MySQL that truncates an over-long key even in strict mode, so that two keys
        # could become one.
        record = IdempotencyRecord.objects.using(self.using).create(
            **vars(scope),
            request_hash=request_hash,
            status=Status.IN_PROGRESS,
            lease_expires_at=from_now(lease),
            expires_at=from_now(retention),
        )
        return record.pk

    def read(self, scope: Scope) -> Row | None:
        """The record of the scope, or None if there is none."""
        records = IdempotencyRecord.objects.using(self.using).filter(**vars(scope))
        record = records.annotate(now=Now()).values().first()
        if record is None:
            return None
        now, lease_expires_at = record["now"], record["lease_expires_at"]
        status, outcome = status_of(record["status"]), None
        if status is Status.COMPLETED:
            outcome = Outcome.stored(*map(record.get, _RESPONSE))
        return Row(
            fence=Fence(scope, record["id"], record["attempt"], record["request_hash"]),
            status=status,
            lease_left=0.0 if lease_expires_at is None else (lease_expires_at - now).total_seconds(),
            session=record["session"],
            retention_over=record["expires_at"] <= now,
            outcome=outcome,
        )

    def take_over(self, observed: Fence, *, lease: timedelta, retention: timedelta, undone_by_crash: bool) -> bool:
        """Own the record if it is as it was observed, and recoverable or abandoned.

        :param undone_by_crash: as for ``insert_claim``, but the COMMIT waits for the disk.
        """
        claimable = Q(status=Status.RECOVERABLE) | Q(status=Status.IN_PROGRESS, lease_expires_at__lte=Now())
        return self._change_one(
            self.matching(observed).filter(claimable),
            history=Appended("taken_over", observed.attempt + 1),
            status=Status.IN_PROGRESS,
            attempt=F("attempt") + 1,
            lease_expires_at=from_now(lease),
            expires_at=Greatest("expires_at", from_now(retention)),
        )

    def start_over(
        self, observed: Fence, request_hash: str, *, lease: timedelta, retention: timedelta, undone_by_crash: bool
    ) -> bool:
        """Own the record for a new request if it is as it was observed, its retention is over and no lease is
        running."""
        live = Q(status=Status.IN_PROGRESS, lease_expires_at__gt=Now())
        return self._change_one(
            self.matching(observed).filter(~live, expires_at__lte=Now()),
            history=Appended("started_over", observed.attempt + 1),
            status=Status.IN_PROGRESS,
            attempt=F("attempt") + 1,
            request_hash=request_hash,
            lease_expires_at=from_now(lease),
            expires_at=from_now(retention),
            created_at=Now(),
            **dict.fromkeys(("completed_at", "error", "body_expires_at", *_RESPONSE)),
        )

    def end_lease_of_gone_session(self, observed: Fence) -> bool:
        """End the lease if the record is as it was observed, and the session of its claim is gone."""
        return False  # PostgreSQL alone lets every role see which sessions live

    def park_abandoned(self, observed: Fence) -> bool:
        """Park the record if it is as it was observed, and in progress with its lease over."""
        abandoned = self.matching(observed, status=Status.IN_PROGRESS, lease_expires_at__lte=Now())
        parked = Appended("lease_over", observed.attempt)
        return self._change_one(abandoned, status=Status.PARKED, lease_expires_at=None, history=parked)

    def complete(self, fence: Fence, outcome: Outcome, *, retention: timedelta, commit: bool = False) -> bool:
        """Record the outcome. The retention then ends ``retention`` from now, or later if it was longer already.

        :param commit: send COMMIT along, if the database takes both in one message. The caller's own COMMIT then finds
            nothing to do.
        :raises CommitError: COMMIT was sent along, and it has failed, or it is not known how it ended.
        """
        response: dict[str, Any] = dict(
            zip(_RESPONSE, (outcome.status, outcome.headers, outcome.body, outcome.reference), strict=True)
        )
        if outcome.body_retention is not None:
            response["body_expires_at"] = from_now(outcome.body_retention)
        return self._change_one(
            self.matching(fence, status=Status.IN_PROGRESS),
            status=Status.COMPLETED,
            completed_at=Now(),
            lease_expires_at=None,
            expires_at=Greatest("expires_at", from_now(retention)),
            **response,
        )

    def set_lease(self, fence: Fence, duration: timedelta, *, retention: timedelta) -> bool:
        """Let the claim's lease end ``duration`` from now."""
        return self._change_one(
            self.matching(fence, status=Status.IN_PROGRESS),
            lease_expires_at=from_now(duration),
            expires_at=Greatest("expires_at", from_now(retention)),
        )

    def release(self, fence: Fence, error: str | None = None) -> bool:
        """Give the claim up, so that a retry may run at once.

        :param error: why the attempt failed. None keeps what is known of an earlier one.
        """
        return self._end(fence, Status.RECOVERABLE, "released", error)

    def park(self, fence: Fence, error: str | None = None) -> bool:
        """Let nothing run until an operator has found out how the attempt ended. ``error`` is as for ``release``."""
        return self._end(fence, Status.PARKED, "parked", error)

    def _end(self, fence: Fence, status: Status, event: str, error: str | None) -> bool:
        known: dict[str, Any] = {"history": Appended(event, fence.attempt, error)}
        if error is not None:
            known["error"] = error
        return self._change_one(
            self.matching(fence, status=Status.IN_PROGRESS), status=status, lease_expires_at=None, **known
        )

    # Transactions

    @contextmanager
    def own_transaction(self, what: object) -> Iterator[None]:
        """Run the block in a transaction that is committed when the block ends.

        :param what: the subject of an error message, such as an operation.
        :raises OuterTransactionError: another transaction is open, or autocommit is off.
        """
        connection, using = self.connection, self.using
        if not connection.in_atomic_block and not connection.get_autocommit():
            raise OuterTransactionError(
                f"{what} was called with autocommit off on database {using!r}, so its claim could not be committed for "
                f"others to see. Remove AUTOCOMMIT from the database's settings, and undo every set_autocommit(False)."
            )
        opened = False
        try:
            # durable=True raises in an open transaction, except in the one that TestCase wraps a test in.
            with transaction.atomic(using=using, durable=True):
                opened = True
                yield
        except RuntimeError as error:
            if opened:
                raise
            raise OuterTransactionError(
                f"{what} was called inside an open transaction of database {using!r}, in which its claim could not be "
                f"committed for others to see. Call it outside of atomic(). A protected view is exempt from "
                f"ATOMIC_REQUESTS automatically; if another decorator or an overridden as_view() hides that, mark the "
                f"outermost view with django.db.transaction.non_atomic_requests."
            ) from error

    @contextmanager
    def own_statement(self, what: object) -> Iterator[None]:
        """Run the block's only change as a transaction, which the database commits when it has run the statement.

        That saves the messages for BEGIN and COMMIT. Otherwise this is ``own_transaction()``, which refuses, or is a
        savepoint in a TestCase.
        """
        connection = self.connection
        if connection.in_atomic_block or not connection.get_autocommit() or self.has_open_transaction:
            with self.own_transaction(what):
                yield
            return
        try:
            yield
        except BaseException:
            # As at the end of atomic(): a connection that is lost, or was interrupted, must not stay in use.
            try:
                connection.rollback()
            except Error:
                connection.close()
            raise

    def bound_transaction(
        self, *, idle: timedelta, statement: timedelta | None = None, wait_for_disk: bool = True
    ) -> None:
        """Set limits after which the database ends the open transaction, if it can do that.

        :param idle: how long the transaction may wait for its client's next statement.
        :param statement: how long a statement in it may run; None sets no bound.
        :param wait_for_disk: False lets a crash of the server lose its COMMIT.
        """

    def watch_transaction(self) -> TransactionWatch:
        """Detect whether code in the block ends the open transaction by a COMMIT or ROLLBACK that bypasses Django."""
        return TransactionWatch(self.connection)

    # What an error of the database means

    def lost_a_race(self, error: BaseException) -> bool:
        """Whether the transaction was refused because of another one. Another try may succeed."""
        return False

    def timed_out_waiting(self, error: BaseException) -> bool:
        """Whether another transaction holds the row's lock."""
        return False

    def is_busy(self, error: BaseException) -> bool:
        """Whether the transaction was undone because of another one, so that it may succeed later."""
        return self.lost_a_race(error) or self.timed_out_waiting(error)

    def was_broken_before(self, error: BaseException) -> bool:
        """Whether the statement was ignored because an earlier one had failed in its transaction."""
        return False  # a failed statement only rolls back itself

    def commit_was_refused(self, error: BaseException) -> bool:
        """Whether the database has reported a rollback. After any other error, the COMMIT may have succeeded."""
        return isinstance(error, IntegrityError)  # a deferred constraint; after other errors COMMIT may have succeeded

    def is_permanent(self, error: BaseException) -> bool:
        """Whether the same statement fails again until the schema, a permission or the code is changed."""
        return isinstance(error, ProgrammingError)

    def is_duplicate(self, error: BaseException) -> bool:
        """Whether the insert of a claim was refused because its scope has a record already."""
        return isinstance(error, IntegrityError)

    def _change_one(self, rows: QuerySet[IdempotencyRecord], **changes: Any) -> bool:
        # Each of these updates changes the status, the attempt or a time. So a database that counts changed rows and
        # not matched rows (MySQL) returns the same number.
        return rows.update(**changes) == 1

    def matching(self, fence: Fence, **state: Any) -> QuerySet[IdempotencyRecord]:
        """The record that the fence names, if it is still that attempt's."""
        return IdempotencyRecord.objects.using(self.using).filter(
            account_id=fence.scope.account_id,
            operation=fence.scope.operation,
            idempotency_key=fence.scope.idempotency_key,
            id=fence.id,
            attempt=fence.attempt,
            request_hash=fence.request_hash,
            **state,
        )


class SQLiteStore(Store):
    """SQLite: one writer at a time. Errors are known by their text, because Django's have no code of SQLite's."""

    has_one_writer = True

    @property
    def has_open_transaction(self) -> bool:
        driver: Any = self.connection.connection
        return bool(driver.in_transaction)

    def watch_transaction(self) -> TransactionWatch:
        return SQLiteWatch(self.connection)

    def is_busy(self, error: BaseException) -> bool:
        return "is locked" in str(error)

    def is_permanent(self, error: BaseException) -> bool:
        text = str(error)
        schema = text.startswith("no such ") or "has no column named" in text
        return schema if isinstance(error, OperationalError) else text.startswith("NOT NULL constraint failed")

    def is_duplicate(self, error: BaseException) -> bool:
        return str(error).startswith("UNIQUE constraint failed")


def from_now(duration: timedelta) -> Combinable:
    """The time ``duration`` from now, by the database's clock."""
    return Now() + duration


#: The module in this folder that has the store of a vendor, and its name there. Other vendors get the portable store.
STORES = {
    "postgresql": ("postgresql", "choose"),
    "sqlite": ("portable", "SQLiteStore"),
    "mysql": ("mysql", "MySQLStore"),
}

#: The attribute in which each of Django's connections keeps its store.
_KEPT = "_idempotency_store"


def store_for(using: str) -> Store:
    """The store of the database alias ``using``, over this thread's connection."""
    connection = connections[using]
    kept: Store | None = vars(connection).get(_KEPT)
    if kept is None:
        # Imported at its first use, so that a process imports the store of its own database only.
        module, name = STORES.get(connection.vendor, ("portable", "Store"))
        kept = getattr(import_module(f".{module}", __package__), name)(connection)
        if not kept.is_provisional:
            setattr(connection, _KEPT, kept)
    return kept
