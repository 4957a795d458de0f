"""``Ownership``: an attempt's hold on its record, and the functions that complete, release or park the record.

Every change of an owned record is fenced: it names the whole scope, the row, the attempt and the payload's fingerprint,
and matches no row once another attempt owns the record.

The row's id and the attempt would suffice if a database never lost a commit. But a first claim may commit without
waiting for the disk. A database that crashes can then lose the claim *and* assign its id again, to another key, at
attempt 1. Because the fence also has the scope and the fingerprint, a claimant that survived such a crash can match
only a claim of the same operation with the same payload. Either of the two may complete it, and only one can.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, auto
from typing import Final, TypeVar

from django.db import DatabaseError, InterfaceError
from django.dispatch import Signal

from .. import signals
from ..exceptions import IdempotencyError, LeaseLostError, UnavailableError
from ..foreign import in_atomic_block
from ..identity.scope import Scope
from ..operation import Operation, Policy
from ..outcome import Outcome
from ..store import Fence, OpenTransactions, Store, store_for
from .faults import fault_point

logger: Final = logging.getLogger("idempotency")

T = TypeVar("T")

#: Permanent errors that were already logged. A half-finished deploy causes one or two kinds at every request.
_reported: set[str] = set()
MAX_REPORTED = 100

#: How often an attempt with an outside effect tries to write. The pause doubles, so all pauses take about 1.5 seconds,
#: in which a restarting server may come back. On PostgreSQL each try waits a second for a lock, so all tries together
#: outlast a frozen peer, whose session the server ends after 5 seconds.
MAX_TRIES = 5
FIRST_PAUSE = 0.1


class End(Enum):
    """How an attempt has ended. While it runs: how it ends if it gets no further."""

    NOT_BEGUN = auto()  # the operation has not begun
    ROLLED_BACK = auto()  # its transaction kept nothing; in autocommit, the outcome is not recorded
    ENDED_ITSELF = auto()  # the operation ended its transaction itself, and what it has committed is unknown
    UNKNOWN = auto()  # COMMIT is sent, after the completing update or with it
    COMMITTED = auto()  # business state and outcome are committed


@dataclass(eq=False, repr=False)
class Ownership:
    """One attempt at an operation: its hold on the record, how far it has come, and how it ends. For the protocol; a
    handler gets it wrapped in a ``Claim``.
    """

    policy: Policy
    fence: Fence
    #: Over the connection of the thread that claimed. Another thread must use ``store_for(using)``.
    store: Store
    #: True in a TestCase, whose transaction hides the record from other connections.
    shares_connection: bool
    #: The session that the claim names, whose end may end the lease. None if it names none.
    session: int | None = None
    #: True if the earlier attempt disappeared and the reconciler must be called before anything runs.
    abandoned: bool = False
    #: True if another attempt is known to own the record.
    lost: bool = False
    #: True if the operation returned a status below 500 that it declares as not recordable. This is not a failure.
    declined: bool = False
    #: True after ``Claim.discard()``: the response or result is not recorded.
    discarded: bool = False
    #: True after ``Claim.begin()``: the handler runs in a transaction, although its operation declares none.
    has_begun: bool = False
    #: With a heartbeat: until when the lease is known to be valid, by ``time.monotonic()``.
    held_until: float | None = None
    #: The outcome to record. None keeps nothing.
    outcome: Outcome | None = None
    end: End = End.NOT_BEGUN
    #: An error of the operation's code that does not concern this attempt, for example from another claim in it.
    foreign_error: Exception | None = None
    #: The open transactions that the operation's code must leave as it found them.
    expected: OpenTransactions = field(default_factory=dict)

    def note_commit(self) -> None:
        self.end = End.COMMITTED

    def note_error(self, error: Exception) -> None:
        """Note an error that the operation's code raised."""
        if not isinstance(error, IdempotencyError) or error.raised_by is not self:
            self.foreign_error = error

    @property
    def using(self) -> str:
        return self.store.using

    @property
    def scope(self) -> Scope:
        return self.fence.scope

    @property
    def attempt(self) -> int:
        return self.fence.attempt

    @property
    def in_transaction(self) -> bool:
        """Whether the handler runs in the transaction that records its outcome."""
        return self.policy.transaction or self.has_begun

    @property
    def is_exclusive(self) -> bool:
        """Whether no other attempt can take over now. In a TestCase no other connection sees the record, and the
        transaction of a single writer blocks every other change.
        """
        return self.shares_connection or (self.in_transaction and self.store.has_one_writer)

    @property
    def is_lost(self) -> bool:
        """Whether another attempt is known to own the record, or no heartbeat has renewed it for a whole lease."""
        if self.held_until is not None and time.monotonic() >= self.held_until and not self.is_exclusive:
            self.lost = True
        return self.lost

    def ensure(self) -> None:
        """:raises LeaseLostError: the lease is known to be lost."""
        if self.is_lost:
            raise self.lost_error()

    def lost_error(self) -> LeaseLostError:
        error = LeaseLostError(
            f"Attempt {self.attempt} of operation {self.scope.operation!r} outlived its lease of "
            f"{self.policy.lease.total_seconds():g} s and was taken over. Its writes are rolled back."
        )
        error.raised_by = self
        return error


def own(policy: Policy, fence: Fence, store: Store, signal: Signal) -> Ownership:
    """Return the ownership of a claim that was just committed, and send its signal."""
    # Here a transaction is open only in a TestCase.
    owned = Ownership(policy, fence, store, in_atomic_block(store.connection))
    if policy.undone_by_crash:
        owned.session = store.session
    signals.send(signal, policy.operation, fence.scope, fence.attempt, request_hash=fence.request_hash)
    return owned


@contextmanager
def on_behalf_of(owned: Ownership) -> Iterator[None]:
    """Mark the block's errors as this attempt's, to distinguish them from errors of a claim inside its handler."""
    try:
        yield
    except IdempotencyError as error:
        error.raised_by = owned
        raise


def fenced_change(owned: Ownership, change: Callable[[], T], *, step: str = "") -> T:
    """Commit a fenced change by itself, and return what ``change`` returns.

    If an operation has an effect outside of the database, its outcome must not be lost because the connection died
    during the outside call, or because the server refused the change in favour of another transaction. So the same
    change is tried again, over a new connection if necessary. The fence lets it happen only once.

    :param change: may be called again after a COMMIT that succeeded but whose answer was lost.
    :param step: the name of the step that the change belongs to. Without a step, the change is one statement.
    """
    what = f"Step {step!r} of operation {owned.scope.operation!r}" if step else owned.policy.operation
    tries = 1 if owned.policy.transaction or owned.shares_connection else MAX_TRIES
    store = store_for(owned.using)
    connection = store.connection
    for number in range(1, tries + 1):
        session = connection.connection
        try:
            with store.own_transaction(what) if step else store.own_statement(what):
                return change()
        except (DatabaseError, InterfaceError) as error:
            if number == tries:
                raise
            if not store.is_busy(error):
                # Django itself may have detected the broken connection and reconnected.
                if session is not None and session is connection.connection and connection.is_usable():
                    raise
                connection.close()
            time.sleep(FIRST_PAUSE * 2 ** (number - 1))  # nothing signals a server's return or a rival's end
    raise AssertionError  # pragma: no cover - the last try returns or raises


def complete(owned: Ownership, outcome: Outcome, *, commit: bool = False) -> None:
    """Record the outcome if the attempt still owns the record. This is the last statement of the business transaction.

    If the process dies before the COMMIT, neither the business writes nor the outcome exist. If it dies after the
    COMMIT, both exist. If it slept before this statement until another attempt took over, no row matches, and the
    caller's transaction must roll back.

    :param commit: let the store send COMMIT in the same message, which may raise a ``CommitError``.
    :raises LeaseLostError: another attempt owns the record.
    """
    fault_point["complete.before"]()
    if not owned.store.complete(owned.fence, outcome, retention=owned.policy.retention, commit=commit):
        owned.lost = True
        raise owned.lost_error()


def stay_in_session(owned: Ownership) -> None:
    """Before the attempt's transaction begins, check that it will run in the session that the claim names.

    Since the claim, a receiver of its signal may have closed the connection, as ``close_old_connections()`` does. The
    next retry would take the old session's end for the attempt's. So from now on the claim names none.

    :raises LeaseLostError: another attempt owns the record.
    """
    if owned.session is None or owned.session == owned.store.session:
        return
    lease, retention = owned.policy.lease, owned.policy.retention
    if not fenced_change(owned, lambda: owned.store.leave_session(owned.fence, lease, retention=retention)):
        owned.lost = True
        raise owned.lost_error()
    owned.session = None


def record(owned: Ownership, outcome: Outcome) -> None:
    """Record an outcome outside of the operation's transaction.

    :raises LeaseLostError: another attempt owns the record.
    :raises UnavailableError: the outcome could not be recorded, or whether it was is unknown.
    """
    with store_errors(owned.using, completing=owned.policy.operation):
        try:
            fenced_change(owned, lambda: complete(owned, outcome))
        except LeaseLostError:
            # The COMMIT of an earlier try may have succeeded although its answer was lost. Then the record has this
            # attempt's outcome already.
            row = store_for(owned.using).read(owned.scope)
            if row is None or (row.fence, row.outcome) != (owned.fence, outcome):
                raise


def release(owned: Ownership, error: str | None = None) -> bool:
    """Give up the claim, so that a retry runs at once. Only for a run that is known to have had no effect.

    :param error: why the run failed, for operators. None keeps the error of an earlier attempt.
    :returns: False if another attempt owns the record, so nothing was released.
    """
    fault_point["release.before"]()
    released = fenced_change(owned, lambda: store_for(owned.using).release(owned.fence, error))
    fault_point["release.sent"]()
    return released


def park(owned: Ownership, error: str | None = None) -> bool:
    """Stop automatic handling, because whether the attempt took effect is unknown. Otherwise like ``release``."""
    return fenced_change(owned, lambda: store_for(owned.using).park(owned.fence, error))


def postpone(owned: Ownership, duration: timedelta) -> bool:
    """End the lease after ``duration``. The next retry or sweep after that calls the reconciler again."""
    return fenced_change(
        owned, lambda: store_for(owned.using).set_lease(owned.fence, duration, retention=owned.policy.retention)
    )


@contextmanager
def store_errors(using: str, *, completing: Operation | None = None) -> Iterator[None]:
    """Turn a database error in the block into an ``UnavailableError``."""
    try:
        yield
    except (DatabaseError, InterfaceError) as error:
        raise unavailable(using, error, completing=completing) from error


def misfit(using: str, error: Exception) -> str:
    """What an operator has to do about a permanent error in the record's database."""
    return (
        f"Every protected operation fails: the tables of idempotency in database {using!r} don't fit this release, or "
        f"its role lacks a permission ({_kind(error)}). Run manage.py migrate and manage.py check --database {using}, "
        f"finish the deploy, or grant the permission."
    )


def _kind(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def unavailable(using: str, error: Exception, *, completing: Operation | None = None) -> UnavailableError:
    """The error that a caller gets for an error in the record's database.

    A permanent error, such as a missing column in a half-finished deploy, is logged once and gets no ``Retry-After``.

    :param completing: the operation whose handler has run on the connection since its record was claimed.
    """
    if not store_for(using).is_permanent(error):
        return UnavailableError(retry_after=1)
    kind = _kind(error)
    problem = (
        misfit(using, error)
        if completing is None
        else f"{completing} claimed its record in database {using!r} but could not complete it ({kind}). Its handler "
        f"has probably changed the role or the search_path of the connection, for example by SET LOCAL ROLE, and must "
        f"reset them before it returns. If it has not, the tables don't fit this release: run manage.py migrate."
    )
    if problem not in _reported and len(_reported) < MAX_REPORTED:
        _reported.add(problem)
        logger.critical(problem, exc_info=error)
    return UnavailableError("The request could not be recorded. A retry fails, too, until the service is repaired.")
