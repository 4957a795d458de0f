"""``Store``: the statements on one record, which claim it and change it.

It uses Django's ORM and the database's clock, so it works on any database. SQLite's store differs little and is here,
too.

A method that changes a record returns whether one row matched and was changed. Call it in ``own_statement()`` or in a
transaction of this package, so that its settings, such as the lock timeout, end with the transaction. Only
``complete(commit=True)`` commits by itself. In a TestCase the transaction is a savepoint, and nothing is set, because
the settings would outlive it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any, Final

from django.db import Error, IntegrityError, OperationalError, ProgrammingError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import BooleanField, ExpressionWrapper, F, Q, QuerySet
from django.db.models.expressions import Combinable
from django.db.models.functions import Greatest

from .. import foreign
from ..exceptions import OuterTransactionError
from ..identity.scope import Scope
from ..lifecycle import Status
from ..models import IdempotencyRecord, Now
from ..outcome import Outcome
from .history import Appended
from .rows import Fence, Row, newer_record
from .transaction_guard import SQLiteWatch, TransactionWatch


def status_of(stored: str) -> Status:
    """The state of a record, from its column.

    :raises UnavailableError: this release doesn't know it.
    """
    try:
        return Status(stored)
    except ValueError:
        raise newer_record(f"the status {stored!r}") from None


#: What ``decide()`` needs to know about a record's times, compared by the database.
BY_ITS_CLOCK: Final[Mapping[str, Any]] = {
    "lease_left": F("lease_expires_at") - Now(),
    "retention_over": ExpressionWrapper(Q(expires_at__lte=Now()), output_field=BooleanField()),
}

_RESPONSE = ("response_status", "response_headers", "response_body", "response_reference")


class Store:
    """Any database, over one of Django's connections, which belongs to one thread.

    It changes a record by the same compare-and-sets as the PostgreSQL store.
    """

    #: Whether this store is a guess, because the database could not be queried.
    is_provisional = False

    #: Whether an open transaction that has written blocks writes by every other connection.
    has_one_writer = False

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.connection = connection
        self.using: str = connection.alias

    @property
    def is_nested(self) -> bool:
        """Whether the open transaction is a savepoint of the one that TestCase wraps a test in."""
        return bool(foreign.savepoint_ids(self.connection))

    def row_of(self, query: str, parameters: Sequence[Any] | None = None) -> Any:
        """The first row of a query's result, or None."""
        with self.connection.cursor() as cursor:
            cursor.execute(query, parameters)
            return cursor.fetchone()

    @property
    def has_open_transaction(self) -> bool:
        """Whether the driver has a transaction open, even one begun by a raw BEGIN, or can't report it."""
        return True

    @property
    def session(self) -> int | None:
        """The connection's session. None if it is closed, or if the database doesn't show which sessions are alive."""
        return None

    # Claims

    def insert_claim(
        self, scope: Scope, request_hash: str, *, lease: timedelta, retention: timedelta, undone_by_crash: bool
    ) -> int | Row | None:
        """Insert the record for a first attempt.

        :param undone_by_crash: whether a crash undoes the attempt's effects. Then a server crash may lose the claim's
            COMMIT, and the end of the session may end the lease, on a database that supports it.
        :returns: the record's id. If the scope has a record already, that record, or None if it was not read.
        :raises IntegrityError: the scope has a record already, and the database reports this as an error.
        """
        # Not INSERT IGNORE, because on MySQL it truncates an over-long key even in strict mode, which could make two
        # keys equal.
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
        record: Any = records.annotate(**BY_ITS_CLOCK).values().first()
        if record is None:
            return None
        status, outcome = status_of(record["status"]), None
        if status is Status.COMPLETED:
            outcome = Outcome.stored(*map(record.get, _RESPONSE))
        return Row(
            fence=Fence(scope, record["id"], record["attempt"], record["request_hash"]),
            status=status,
            lease_left=0.0 if record["lease_left"] is None else record["lease_left"].total_seconds(),
            session=record["session"],
            retention_over=record["retention_over"],
            outcome=outcome,
        )

    def take_over(self, observed: Fence, *, lease: timedelta, retention: timedelta, undone_by_crash: bool) -> bool:
        """Own the record, if it is as observed and either recoverable or abandoned.

        :param undone_by_crash: as for ``insert_claim``, but the COMMIT waits for the disk.
        """
        return self._change_one(
            self.matching(observed).filter(Q(status=Status.RECOVERABLE) | _abandoned()),
            history=Appended("taken_over", observed.attempt + 1),
            status=Status.IN_PROGRESS,
            attempt=F("attempt") + 1,
            lease_expires_at=from_now(lease),
            expires_at=Greatest("expires_at", from_now(retention)),
        )

    def start_over(
        self, observed: Fence, request_hash: str, *, lease: timedelta, retention: timedelta, undone_by_crash: bool
    ) -> bool:
        """Own the record for a new request, if it is as observed, past its retention, and neither live nor parked."""
        settled = Q(status__in=[Status.COMPLETED, Status.RECOVERABLE])
        return self._change_one(
            self.matching(observed).filter(settled | _abandoned(), expires_at__lte=Now()),
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
        """End the lease, if the record is as observed and the claim's session is gone."""
        return False  # only PostgreSQL shows every role which sessions are alive

    def park_abandoned(self, observed: Fence) -> bool:
        """Park the record, if it is as observed and still in progress with its lease over."""
        abandoned = self.matching(observed, status=Status.IN_PROGRESS, lease_expires_at__lte=Now())
        parked = Appended("lease_over", observed.attempt)
        return self._change_one(abandoned, status=Status.PARKED, lease_expires_at=None, history=parked)

    def complete(self, fence: Fence, outcome: Outcome, *, retention: timedelta, commit: bool = False) -> bool:
        """Record the outcome. The retention ends ``retention`` from now, or later if it was longer already.

        :param commit: send COMMIT in the same message, if the database supports that. The caller's COMMIT then has
            nothing to do.
        :raises CommitError: the COMMIT in the same message failed, or its result is unknown.
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
        """Make the claim's lease end ``duration`` from now."""
        return self._set_lease(fence, duration, retention)

    def _set_lease(self, fence: Fence, duration: timedelta, retention: timedelta, **changes: Any) -> bool:
        return self._change_one(
            self.matching(fence, status=Status.IN_PROGRESS),
            lease_expires_at=from_now(duration),
            expires_at=Greatest("expires_at", from_now(retention)),
            **changes,
        )

    def leave_session(self, fence: Fence, lease: timedelta, *, retention: timedelta) -> bool:
        """Renew a claim's lease, and name no session any more, because its handler runs in another one."""
        return self._set_lease(fence, lease, retention, session=None)

    def release(self, fence: Fence, error: str | None = None) -> bool:
        """Give up the claim, so that a retry may run at once.

        :param error: why the attempt failed. None keeps the error of an earlier attempt.
        """
        return self._end(fence, Status.RECOVERABLE, "released", error)

    def park(self, fence: Fence, error: str | None = None) -> bool:
        """Run nothing until an operator has found out how the attempt ended. ``error`` is as for ``release``."""
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
        if not foreign.in_atomic_block(connection) and not connection.get_autocommit():
            raise OuterTransactionError(
                f"{what} was called with autocommit off on database {using!r}, so its claim could not be committed "
                f"before it runs. Remove AUTOCOMMIT from the database's settings, and undo every set_autocommit(False)."
            )
        opened = False
        try:
            # durable=True raises in an open transaction, except in the one that TestCase wraps around a test.
            with transaction.atomic(using=using, durable=True):
                opened = True
                yield
        except RuntimeError as error:
            if opened:
                raise
            raise OuterTransactionError(
                f"{what} was called inside an open transaction of database {using!r}, so its claim could not be "
                f"committed before it runs. Call it outside of atomic(). A protected view is exempt from "
                f"ATOMIC_REQUESTS automatically; if another decorator or an overridden as_view() hides that, mark the "
                f"outermost view with django.db.transaction.non_atomic_requests."
            ) from error

    def own_statement(self, what: object) -> AbstractContextManager[None]:
        """Run the block's only statement in autocommit, as a transaction of one statement.

        This saves the messages for BEGIN and COMMIT. If a transaction is open, it falls back to ``own_transaction()``,
        which raises, or sets a savepoint in a TestCase.
        """
        connection = self.connection
        if foreign.in_atomic_block(connection) or not connection.get_autocommit() or self.has_open_transaction:
            return self.own_transaction(what)
        return _InAutocommit(connection)

    def watch_transaction(self) -> TransactionWatch:
        """Detect a COMMIT or ROLLBACK in the block that bypasses Django and ends the open transaction."""
        return TransactionWatch(self.connection)

    # The meaning of database errors

    def lost_a_race(self, error: BaseException) -> bool:
        """Whether the transaction was refused because of a concurrent one. Another try may succeed."""
        return False

    def timed_out_waiting(self, error: BaseException) -> bool:
        """Whether another transaction holds the row's lock."""
        return False

    def is_busy(self, error: BaseException) -> bool:
        """Whether the transaction was undone because of a concurrent one, so that it may succeed later."""
        return self.lost_a_race(error) or self.timed_out_waiting(error)

    def was_broken_before(self, error: BaseException) -> bool:
        """Whether the statement was ignored because an earlier one had failed in its transaction."""
        return False  # a failed statement only rolls back itself

    def was_refused_in_transaction(self, error: BaseException) -> bool:
        """Whether the statement must be the first of its transaction, or run outside of one."""
        return False

    def was_read_only(self, error: BaseException) -> bool:
        """Whether the statement was refused because its transaction must not write."""
        return False

    def commit_was_refused(self, error: BaseException) -> bool:
        """Whether the database reported a rollback. After any other error, the COMMIT may have succeeded."""
        return isinstance(error, IntegrityError)  # a deferred constraint

    def is_permanent(self, error: BaseException) -> bool:
        """Whether the same statement fails again until the schema, a permission or the code is changed."""
        return isinstance(error, ProgrammingError)

    def is_duplicate(self, error: BaseException) -> bool:
        """Whether the insert of a claim was refused because its scope has a record already."""
        return isinstance(error, IntegrityError)

    def _change_one(self, rows: QuerySet[IdempotencyRecord], **changes: Any) -> bool:
        # Each of these updates changes the status, the attempt or a time. So a database that counts changed rows
        # instead of matched ones (MySQL) returns the same number.
        return rows.update(**changes) == 1

    def matching(self, fence: Fence, **state: Any) -> QuerySet[IdempotencyRecord]:
        """The record that the fence names, if that attempt still owns it."""
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
    """SQLite: one writer at a time. Errors are recognised by text, because Django's lack SQLite's code."""

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


@dataclass(eq=False, repr=False)
class _InAutocommit:
    """A block of one statement in autocommit."""

    connection: BaseDatabaseWrapper

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            # As atomic() does: a connection that was lost or interrupted must not stay in use.
            try:
                self.connection.rollback()
            except Error:
                self.connection.close()


def _abandoned() -> Q:
    return Q(status=Status.IN_PROGRESS, lease_expires_at__lte=Now())


def from_now(duration: timedelta) -> Combinable:
    """The time ``duration`` from now, by the database's clock."""
    return Now() + duration


#: For each vendor, the module in this folder and the name of the store in it. Other vendors get the portable store.
STORES = {
    "postgresql": ("postgresql", "choose"),
    "sqlite": ("portable", "SQLiteStore"),
    "mysql": ("mysql", "MySQLStore"),
}

#: The attribute that holds a connection's store.
_KEPT = "_idempotency_store"


def store_for(using: str) -> Store:
    """The store for the alias ``using``, over this thread's connection."""
    connection = connections[using]
    kept: Store | None = getattr(connection, _KEPT, None)
    if kept is None:
        # Imported at first use, so that a process imports only the stores that it needs.
        module, name = STORES.get(connection.vendor, ("portable", "Store"))
        kept = getattr(import_module(f".{module}", __package__), name)(connection)
        if not kept.is_provisional:
            setattr(connection, _KEPT, kept)
    return kept
