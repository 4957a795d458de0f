"""Run a callable under a claim, so that its effects and its outcome stand or fall together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import NoReturn, Protocol

from django.db import DatabaseError, InterfaceError, connections, transaction
from django.dispatch import Signal

from .. import signals, sql
from ..exceptions import IdempotencyError, InProgressError, LeaseLostError, TransactionBrokenError, UnavailableError
from ..identity.fingerprint import Payload
from ..identity.scope import Scope
from ..lifecycle import Recovery
from ..operation import Operation
from ..options.values import Wait
from ..outcome import Outcome
from . import claims
from .claim import Claim
from .context import claim_in_context, current_claim
from .faults import fault_point
from .ownership import Ownership, on_behalf_of
from .recovery import reconcile
from .renewal import heartbeat
from .transactions import unavailable

__all__ = ["Attempt", "Running", "acquire_or_wait", "current_claim", "release_or_park", "run", "running"]

logger = logging.getLogger("idempotency")

#: How often a waiting duplicate looks for the outcome, in seconds: soon at first, then at a pace that costs little.
FIRST_POLL = 0.02
SLOWEST_POLL = 0.5


def acquire_or_wait(operation: Operation, scope: Scope, payload: Payload) -> Ownership | Outcome:
    """Own the scope or learn the outcome, after whatever waiting and recovery the operation declares.

    Raises what ``claims.acquire`` raises.
    """
    deadline = time.monotonic() + (operation.in_progress.seconds if isinstance(operation.in_progress, Wait) else 0)
    pause = FIRST_POLL
    while True:
        try:
            held = claims.acquire(operation, scope, payload)
            if isinstance(held, Ownership) and held.abandoned:
                outcome = reconcile(held)
                return held if outcome is None else outcome
            return held
        except InProgressError:
            left = deadline - time.monotonic()
            if left <= 0:
                signals.send(signals.conflicted, operation, scope, 0)
                raise
            # The attempt is another process's, and databases have no common way to tell of its end. No transaction and
            # no lock is held meanwhile.
            time.sleep(min(pause, left))  # between two looks for another process's outcome
            pause = min(pause * 2, SLOWEST_POLL)


class Attempt(Protocol):
    """What an entry to the protocol (an HTTP request, a message) runs under a claim."""

    def call(self) -> Outcome | None:
        """Run the operation. None: nothing of this run is to be kept."""

    def outcome_of_error(self, error: Exception) -> Outcome | None:
        """What an exception of ``call`` amounts to, asked after the run's writes are rolled back.

        None: nothing is to be kept. Raises ``error`` if it is a crash.
        """


def run(claim: Claim, attempt: Attempt) -> None:
    """Run an attempt and record its outcome. Raises what ``running`` raises."""
    with running(claim, attempt.outcome_of_error) as slot:
        slot.outcome = attempt.call()


@dataclass
class Running:
    """A run under a claim. ``outcome`` is what is to be recorded of it; None: nothing is to be kept."""

    claim: Claim
    outcome: Outcome | None = None


def _crash(error: Exception) -> Outcome | None:
    raise error


@contextmanager
def running(claim: Claim, outcome_of_error: Callable[[Exception], Outcome | None] = _crash) -> Iterator[Running]:
    """Run the block as the claim's attempt, and record the outcome that it leaves.

    With ``transaction=True`` the block is one transaction of the record's database, and the completing update is its
    last statement: business state and outcome are both there or neither is. A block that raises, or leaves no
    outcome, is rolled back and the claim is released. Without, the outcome is recorded right after the block.

    :param outcome_of_error: says what an exception of the block amounts to, after its writes are rolled back: an
        outcome, None if nothing is to be kept, or it raises if the exception is a crash.
    :raises LeaseLostError: another attempt owns the record; this one's writes are rolled back.
    :raises UnavailableError: the outcome could not be recorded, or COMMIT failed without saying how it ended.
    :raises TransactionBrokenError: the block swallowed a database error and went on, or ended its transaction itself.
    """
    owned = claim.ownership
    in_its_way = _in_transaction if owned.operation.transaction else _in_autocommit
    token = claim_in_context.set(claim)
    try:
        with heartbeat(owned), in_its_way(claim, outcome_of_error) as slot:
            fault_point("handler.before")
            yield slot
    except IdempotencyError as error:
        if isinstance(error, LeaseLostError) and error.raised_by is owned:
            signals.send(signals.lease_lost, owned.operation, owned.scope, owned.attempt)
        raise
    finally:
        claim_in_context.reset(token)
    if slot.outcome is not None:
        fault_point("complete.committed")
        signals.send(signals.completed, owned.operation, owned.scope, owned.attempt)


class Phase(Enum):
    """How far the transaction of an attempt has come."""

    OPENING = auto()  # nothing of the operation's own has run
    RUNNING = auto()  # the operation runs
    COMPLETING = auto()  # it has left an outcome, which is being recorded
    COMMITTING = auto()  # COMMIT is sent


class End(Enum):
    """What it means that an attempt's transaction ended with an error."""

    NOT_STARTED = auto()  # the store failed before the operation ran
    ROLLED_BACK = auto()  # nothing that was written is there
    REFUSED = auto()  # COMMIT was refused because of another transaction; the same again may succeed
    UNKNOWN = auto()  # COMMIT was sent and its answer never came
    COMMITTED = auto()  # all is there; what failed came after it
    ESCAPED = auto()  # the operation ended the transaction itself, so some of its writes may be there


def _end_of(error: Exception, phase: Phase, ended_itself: bool, using: str) -> End:
    """Say what an error in a phase means for what was written."""
    store = sql.store(using)
    of_database = isinstance(error, (DatabaseError, InterfaceError))
    if ended_itself:
        return End.ESCAPED
    if phase is Phase.COMMITTING:
        if not of_database:
            return End.COMMITTED  # an on_commit callback failed
        if not store.commit_was_refused(error):
            return End.UNKNOWN
        # An on_commit callback may have raised this, too. All is committed then, and whatever is done to the claim is
        # fenced: it matches nothing, because the record is completed.
        return End.REFUSED if store.lost_a_race(error) else End.ROLLED_BACK
    if phase is Phase.OPENING and of_database:
        return End.NOT_STARTED
    return End.ROLLED_BACK


@contextmanager
def _in_transaction(claim: Claim, outcome_of_error: Callable[[Exception], Outcome | None]) -> Iterator[Running]:
    owned = claim.ownership
    using, store = owned.using, sql.store(owned.using)
    slot, phase, undone = Running(claim), Phase.OPENING, False
    ended_itself = False
    try:
        with transaction.atomic(using=using, durable=True), store.watch_transaction() as watch:
            if owned.operation.idle_timeout is not None:
                store.bound_transaction(idle=owned.operation.idle_timeout)
            phase = Phase.RUNNING
            try:
                yield slot
                watch.look()
            finally:
                ended_itself = watch.ended
            if ended_itself:
                raise _ended_itself(owned)  # so that what is left open rolls back
            phase = Phase.COMPLETING
            if slot.outcome is None:
                transaction.set_rollback(True, using=using)
            elif connections[using].needs_rollback and slot.outcome.status >= 400:
                undone = True  # the handler undid its writes to answer with a failure: set_rollback(True), or an error
            else:
                _complete(owned, slot.outcome)
                phase = Phase.COMMITTING
    except Exception as error:  # noqa: BLE001 - each is either recorded or raised on
        # A BaseException (the worker is told to exit) passes by and releases nothing: a dying process makes no
        # promises, and the lease runs out by itself.
        end = _end_of(error, phase, ended_itself, using)
        if end is not End.ROLLED_BACK:
            _raise_for_end(end, error, owned)
        slot.outcome = _outcome_of_error(error, owned, outcome_of_error)
        undone = slot.outcome is not None
    if slot.outcome is None:
        release_or_park(owned)
    elif undone:
        claims.record(owned, slot.outcome)


def _raise_for_end(end: End, error: Exception, owned: Ownership) -> NoReturn:
    """Give the claim up, or not, after a transaction that did not simply roll back, and say how it ended."""
    if end is End.COMMITTED:
        raise error  # the retry replays what is committed
    with on_behalf_of(owned):
        if end is End.UNKNOWN:
            # It may have happened. To release now could run the operation twice. The retry reads the record.
            logger.error("COMMIT of operation %r did not say how it ended", owned.operation.name, exc_info=error)
            raise UnavailableError(
                "The database did not confirm the commit. Retry with the same Idempotency-Key to learn the outcome.",
                retry_after=1,
            ) from error
        if end is End.ESCAPED:
            _park(owned)  # what it has committed by itself is not known, so it must not run again by itself
            raise _ended_itself(owned) from error
        release_or_park(owned)
        raise unavailable(owned.using, error) from error


@contextmanager
def _in_autocommit(claim: Claim, outcome_of_error: Callable[[Exception], Outcome | None]) -> Iterator[Running]:
    owned = claim.ownership
    slot = Running(claim)
    try:
        yield slot
    except Exception as error:  # noqa: BLE001 - each is either recorded or raised on
        slot.outcome = _outcome_of_error(error, owned, outcome_of_error)
    if slot.outcome is None:
        release_or_park(owned)
    else:
        # If the process dies before this COMMIT, or it fails, the effect may be there without its outcome. Nothing is
        # given up; the lease runs out and recovery does what the operation declares.
        claims.record(owned, slot.outcome)


def _outcome_of_error(
    error: Exception, owned: Ownership, outcome_of_error: Callable[[Exception], Outcome | None]
) -> Outcome | None:
    """What an exception of the operation amounts to. If it is a crash, the claim is ended before the exception goes on.

    An error that this very attempt met (its lease was lost, its store failed) is nobody's answer. One that another
    claim met, such as a ``claim()`` in the handler, is like any other exception of the handler.
    """
    if isinstance(error, IdempotencyError) and error.raised_by is owned:
        release_or_park(owned)
        raise error
    try:
        return outcome_of_error(error)
    except Exception:  # raised on: only the claim is ended first, whatever the project's handler failed with
        release_or_park(owned)
        raise


def _complete(owned: Ownership, outcome: Outcome) -> None:
    """Complete within the attempt's own transaction."""
    with on_behalf_of(owned):
        if connections[owned.using].needs_rollback:
            raise _broken(owned)
        try:
            claims.complete(owned, outcome)
        except (DatabaseError, InterfaceError) as error:
            if sql.store(owned.using).was_broken_before(error):
                raise _broken(owned) from error
            raise unavailable(owned.using, error) from error


def _broken(owned: Ownership) -> TransactionBrokenError:
    return TransactionBrokenError(
        f"Operation {owned.operation.name!r} returned a response although its transaction had been marked for rollback "
        f"or broken by a database error, so nothing it wrote could be kept. Let the error propagate, or run the "
        f"statement that may fail in an atomic() of its own."
    )


def _ended_itself(owned: Ownership) -> TransactionBrokenError:
    return TransactionBrokenError(
        f"Operation {owned.operation.name!r} has ended its transaction itself, by a COMMIT or ROLLBACK that went past "
        f"Django, so its outcome could not be tied to what it wrote. It is parked until somebody has found out what is "
        f"there. Remove the statement, or declare the operation with transaction=False."
    )


def release_or_park(owned: Ownership) -> None:
    """End an attempt that recorded nothing, as far as its operation lets us say what that means.

    If all that it wrote was in one transaction with the record, or REEXECUTE is declared, another run is safe and may
    come at once. Otherwise an attempt without an outcome may have had its effect. A PARK operation is parked. One with
    a reconciler keeps its claim, because what it sent may even be on its way still: the reconciler is asked when the
    lease is over. Never raises: what ended the attempt matters more, and a claim that could not be released is
    recovered when its lease is over.
    """
    operation = owned.operation
    # Done after a lost lease too: both changes are fenced, and match nothing then.
    undone = operation.transaction and not owned.has_effects_elsewhere
    if undone or operation.recovery is Recovery.REEXECUTE:
        _end(owned, claims.release, signals.released)
    elif operation.recovery is Recovery.PARK:
        _park(owned)


def _park(owned: Ownership) -> None:
    _end(owned, claims.park, signals.parked)


def _end(owned: Ownership, change: Callable[[Ownership], bool], signal: Signal) -> None:
    try:
        ended = change(owned)
    except (DatabaseError, InterfaceError, IdempotencyError):
        logger.warning(
            "Operation %r: attempt %d could not be released; its lease runs out by itself",
            owned.operation.name,
            owned.attempt,
            exc_info=True,
        )
        return
    if ended:
        signals.send(signal, owned.operation, owned.scope, owned.attempt)
