"""Runs an operation under a claim, so that its effects and its outcome are both committed or neither is."""

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
from ..exceptions import (
    IdempotencyError,
    InProgressError,
    LeaseLostError,
    RequestError,
    TransactionBrokenError,
    UnavailableError,
)
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
from .reasons import recorded_reason
from .recovery import reconcile
from .renewal import heartbeat
from .transactions import unavailable

__all__ = ["Attempt", "Running", "acquire_or_wait", "current_claim", "release_or_park", "run", "running"]

logger = logging.getLogger("idempotency")

#: The pauses, in seconds, between two looks of a waiting duplicate. They are short at first and then grow.
FIRST_POLL = 0.02
SLOWEST_POLL = 0.25


def acquire_or_wait(
    operation: Operation, scope: Scope, payload: Payload, refusal: RequestError | None = None
) -> Ownership | Outcome:
    """Own the scope or learn the outcome, after the waiting and the recovery that the operation declares.

    :param refusal: raised in place of beginning a new operation.

    Raises the errors of ``claims.acquire``.
    """
    deadline = time.monotonic() + (operation.in_progress.seconds if isinstance(operation.in_progress, Wait) else 0)
    pause, has_waited = FIRST_POLL, False
    while True:
        try:
            held = claims.acquire(operation, scope, payload, expect_record=has_waited, refusal=refusal)
            if isinstance(held, Ownership) and held.abandoned:
                outcome = reconcile(held)
                return held if outcome is None else outcome
            return held
        except InProgressError:
            left = deadline - time.monotonic()
            if left <= 0:
                signals.send(signals.conflicted, operation, scope, 0)
                raise
            # No transaction and no lock is held meanwhile, and to look again is one read.
            time.sleep(min(pause, left))  # no report of the end of another's attempt works with every database
            pause, has_waited = min(pause * 2, SLOWEST_POLL), True


class Attempt(Protocol):
    """One attempt to run an operation: what an HTTP request runs under a claim."""

    def call(self) -> Outcome | None:
        """Run the operation.

        :returns: the outcome to record, or None if nothing of this run is kept.
        """

    def outcome_of_error(self, error: Exception) -> Outcome | None:
        """Turn an exception of ``call`` into an outcome. Called after the run's writes are rolled back.

        :returns: the outcome to record, or None if nothing of this run is kept.
        :raises Exception: ``error`` itself, if it is a crash.
        """


def run(claim: Claim, attempt: Attempt) -> None:
    """Run an attempt and record its outcome. Raises the errors of ``running``."""
    with running(claim, attempt.outcome_of_error) as slot:
        slot.outcome = attempt.call()


@dataclass
class Running:
    """A run under a claim. The block sets ``outcome`` to what is recorded; None means that nothing is kept."""

    claim: Claim
    outcome: Outcome | None = None


def _crash(error: Exception) -> Outcome | None:
    raise error


@contextmanager
def running(claim: Claim, outcome_of_error: Callable[[Exception], Outcome | None] = _crash) -> Iterator[Running]:
    """Run the block as the claim's attempt, and record the outcome that it sets.

    With ``transaction=True`` the block runs in one transaction of the record's database, and the completing update is
    the last statement: business state and outcome are both committed or neither is. If the block raises an error or
    sets no outcome, it is rolled back and the claim is released. With ``transaction=False`` the outcome is recorded
    right after the block.

    :param outcome_of_error: called with an exception of the block, after its writes are rolled back. It returns the
        outcome to record, or None if nothing is kept, or raises if the exception is a crash.
    :raises LeaseLostError: another attempt owns the record. This attempt's writes are rolled back.
    :raises UnavailableError: the outcome could not be recorded, or COMMIT failed without saying how it ended.
    :raises TransactionBrokenError: the block continued after a database error, or ended its transaction itself.
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

    OPENING = auto()  # the operation has not begun
    RUNNING = auto()  # the operation runs
    COMPLETING = auto()  # the operation has ended, and its outcome is being recorded
    COMMITTING = auto()  # the outcome is recorded, and COMMIT is sent


class End(Enum):
    """What it means that an attempt's transaction ended with an error."""

    NOT_STARTED = auto()  # the database failed before the operation ran
    ROLLED_BACK = auto()  # nothing was committed
    REFUSED = auto()  # COMMIT was refused because of another transaction; another try may succeed
    UNKNOWN = auto()  # COMMIT was sent, and its answer never came
    COMMITTED = auto()  # everything was committed, and something failed afterwards
    ESCAPED = auto()  # the operation ended the transaction itself, so some of its writes may be committed


def _end_of(error: Exception, phase: Phase, ended_itself: bool, using: str) -> End:
    """Decide what an error in a phase means for what was written."""
    store = sql.store(using)
    of_database = isinstance(error, (DatabaseError, InterfaceError))
    if ended_itself:
        return End.ESCAPED
    if phase is Phase.COMMITTING:
        if not of_database:
            return End.COMMITTED  # an on_commit callback failed
        if not store.commit_was_refused(error):
            return End.UNKNOWN
        # An on_commit callback may have raised this error, too. Then everything is committed, and a later change of the
        # claim matches no row, because the record is completed.
        return End.REFUSED if store.lost_a_race(error) else End.ROLLED_BACK
    if phase is Phase.OPENING and of_database:
        return End.NOT_STARTED
    return End.ROLLED_BACK


@contextmanager
def _in_transaction(claim: Claim, outcome_of_error: Callable[[Exception], Outcome | None]) -> Iterator[Running]:
    owned = claim.ownership
    using, store = owned.using, sql.store(owned.using)
    slot, phase, undone = Running(claim), Phase.OPENING, False
    ended_itself, reason = False, None
    try:
        with transaction.atomic(using=using, durable=True):
            if owned.operation.idle_timeout is not None:
                store.bound_transaction(idle=owned.operation.idle_timeout)
            phase = Phase.RUNNING
            with store.watch_transaction() as watch:
                try:
                    yield slot
                    watch.look()
                finally:
                    ended_itself = watch.ended
            if ended_itself:
                raise _ended_itself(owned)  # so that an open transaction rolls back
            phase = Phase.COMPLETING
            if slot.outcome is None:
                transaction.set_rollback(True, using=using)
            elif connections[using].needs_rollback and slot.outcome.status >= 400:
                undone = True  # the handler answers with a failure after set_rollback(True) or a database error
            else:
                _complete(owned, slot.outcome)
                phase = Phase.COMMITTING
    except Exception as error:  # noqa: BLE001 - each error is either recorded or raised again
        # A BaseException, such as SystemExit, is not caught and nothing is released, because a dying process may not be
        # able to. The lease runs out.
        end = _end_of(error, phase, ended_itself, using)
        if end is not End.ROLLED_BACK:
            _raise_for_end(end, error, owned)
        slot.outcome = _outcome_of_error(error, owned, outcome_of_error)
        undone, reason = slot.outcome is not None, recorded_reason(error)
    if slot.outcome is None:
        release_or_park(owned, reason)
    elif undone:
        claims.record(owned, slot.outcome)


def _raise_for_end(end: End, error: Exception, owned: Ownership) -> NoReturn:
    """Raise the error for a transaction that did not simply roll back. Release or park the claim if that is safe."""
    if end is End.COMMITTED:
        raise error  # the retry replays what is committed
    with on_behalf_of(owned):
        if end is End.UNKNOWN:
            # The COMMIT may have succeeded, so a release could let the operation run twice. The retry reads the record.
            logger.error("COMMIT of operation %r did not say how it ended", owned.operation.name, exc_info=error)
            raise UnavailableError(
                "The database did not confirm the commit. Retry with the same Idempotency-Key to learn the outcome.",
                retry_after=1,
            ) from error
        if end is End.ESCAPED:
            # It is not known what the operation has committed, so it must not run again automatically.
            _park(owned, recorded_reason(error))
            raise _ended_itself(owned) from error
        release_or_park(owned, recorded_reason(error))
        raise unavailable(owned.using, error) from error


@contextmanager
def _in_autocommit(claim: Claim, outcome_of_error: Callable[[Exception], Outcome | None]) -> Iterator[Running]:
    owned = claim.ownership
    slot, reason = Running(claim), None
    try:
        yield slot
    except Exception as error:  # noqa: BLE001 - each error is either recorded or raised again
        slot.outcome = _outcome_of_error(error, owned, outcome_of_error)
        reason = recorded_reason(error)
    if slot.outcome is None:
        release_or_park(owned, reason)
    else:
        # If the process dies before this COMMIT, or the COMMIT fails, there may be an effect without an outcome. The
        # claim is not released. When the lease is over, recovery does what the operation declares.
        claims.record(owned, slot.outcome)


def _outcome_of_error(
    error: Exception, owned: Ownership, outcome_of_error: Callable[[Exception], Outcome | None]
) -> Outcome | None:
    """Turn an exception of the operation into an outcome. If it is a crash, release or park the claim and raise it
    again.

    An error of this attempt itself (its lease was lost, or the database failed) is never an outcome. An error of
    another claim, such as a ``claim()`` block in the handler, counts as an exception of the handler.
    """
    if isinstance(error, IdempotencyError) and error.raised_by is owned:
        release_or_park(owned, recorded_reason(error))
        raise error
    try:
        return outcome_of_error(error)
    except Exception:  # the project's handler may raise anything; the error is raised again
        release_or_park(owned, recorded_reason(error))
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
        f"Django, so its outcome could not be committed together with its writes. It is parked until somebody has "
        f"found out what was committed. Remove the statement, or declare the operation with transaction=False."
    )


def release_or_park(owned: Ownership, reason: str | None = None) -> None:
    """End an attempt that recorded no outcome, as its operation declares.

    The claim is released if all writes were in one transaction with the record, or if REEXECUTE is declared, because
    then it is safe to run again at once. Otherwise the attempt may have taken effect. A PARK operation is parked. An
    operation with a reconciler keeps its claim, because its call may still be on its way; the reconciler is asked when
    the lease is over. Never raises, because the error that ended the attempt matters more. A claim that could not be
    released is recovered when its lease is over.

    :param reason: why the attempt failed, for the record; None if it answered with a status that is not recorded.
    """
    operation = owned.operation
    # After a lost lease this is harmless, because both changes are fenced and match no row.
    undone = operation.transaction and not owned.has_effects_elsewhere
    if undone or operation.recovery is Recovery.REEXECUTE:
        _end(owned, claims.release, reason, signals.released)
    elif operation.recovery is Recovery.PARK:
        _park(owned, reason)


def _park(owned: Ownership, reason: str | None) -> None:
    _end(owned, claims.park, reason, signals.parked)


def _end(owned: Ownership, change: Callable[[Ownership, str | None], bool], reason: str | None, signal: Signal) -> None:
    try:
        ended = change(owned, reason)
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
