"""Runs an operation under a claim, so that its effects and its outcome are both committed or neither is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from django.db import DatabaseError, InterfaceError, transaction
from django.dispatch import Signal

from .. import signals
from ..exceptions import (
    IdempotencyError,
    LeaseLostError,
    TransactionBrokenError,
    UnavailableError,
)
from ..lifecycle import Recovery
from ..outcome import Outcome, recorded_reason
from ..store import CommitError
from . import ownership
from .claim import Claim
from .context import claim_in_context
from .faults import fault_point
from .ownership import Ownership, unavailable
from .renewal import heartbeat

logger: Final = logging.getLogger("idempotency")


@dataclass
class Running:
    """A run under a claim. The block sets ``outcome`` to what is recorded; None means that nothing is kept."""

    claim: Claim
    outcome: Outcome | None = None
    #: Whether the outcome is known to be committed.
    is_committed: bool = False
    #: An error of the operation's code that is none of this attempt, such as that of another claim inside the block.
    foreign_error: Exception | None = None

    def note_commit(self) -> None:
        self.is_committed = True

    def note_error(self, error: Exception) -> None:
        """Note an error that the operation's code has raised."""
        if not isinstance(error, IdempotencyError) or error.raised_by is not self.claim.ownership:
            self.foreign_error = error


def _crash(error: Exception) -> Outcome | None:
    raise error


@contextmanager
def running(run: Running, outcome_of_error: Callable[[Exception], Outcome | None] = _crash) -> Iterator[Running]:
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
    owned = run.claim.ownership
    in_its_way = _in_transaction if owned.policy.transaction else _in_autocommit
    token = claim_in_context.set(run.claim)
    try:
        beat = nullcontext() if owned.policy.heartbeat is None else heartbeat(owned, owned.policy.heartbeat)
        with beat, in_its_way(run, outcome_of_error):
            fault_point["handler.before"]()
            try:
                yield run
            except Exception as error:
                run.note_error(error)
                raise
            if owned.discarded and run.outcome is not None:
                run.outcome, owned.declined = None, True
    except LeaseLostError as error:
        if error is not run.foreign_error:
            signals.send(signals.lease_lost, owned.policy.operation, owned.scope, owned.attempt)
        raise
    finally:
        claim_in_context.reset(token)
        if run.is_committed:  # also if an on_commit callback has failed
            fault_point["complete.committed"]()
            signals.send(signals.completed, owned.policy.operation, owned.fence.scope, owned.fence.attempt)


class Phase(Enum):
    """How far the transaction of an attempt has come."""

    OPENING = auto()  # the operation has not begun
    RUNNING = auto()  # it runs, or its outcome is being recorded
    COMMITTING = auto()  # COMMIT is sent, after the completing update or with it


@contextmanager
def _in_transaction(run: Running, outcome_of_error: Callable[[Exception], Outcome | None]) -> Iterator[None]:
    owned = run.claim.ownership
    store, using = owned.store, owned.store.using
    phase, ended_itself, undone, reason = Phase.OPENING, False, False, None
    try:
        with transaction.atomic(using=using, durable=True):
            if not owned.shares_connection:  # a TestCase runs no callbacks, and its tests may look at them
                store.connection.on_commit(run.note_commit)  # before all callbacks of the operation
            phase = Phase.RUNNING
            watch = store.watch_transaction()
            try:
                with watch:
                    yield
            finally:
                ended_itself = watch.ended
            if ended_itself:
                raise _ended_itself(owned)  # so that an open transaction rolls back
            if run.outcome is None:
                transaction.set_rollback(True, using=using)
            elif store.connection.needs_rollback and run.outcome.status >= 400:
                undone = True  # the handler answers with a failure after set_rollback(True) or a database error
            else:
                _complete(owned, run.outcome)
                phase = Phase.COMMITTING
    except Exception as error:
        if isinstance(error, CommitError):
            phase, error = Phase.COMMITTING, error.error
        # A BaseException, such as SystemExit, is not caught and nothing is released, because a dying process may not be
        # able to. The lease runs out.
        if run.is_committed:
            run.foreign_error = error
            raise  # an on_commit callback failed, and the retry replays what is committed
        _raise_unless_rolled_back(error, phase, ended_itself, owned)
        run.outcome = _outcome_of_error(error, run, outcome_of_error)
        undone, reason = run.outcome is not None, None if owned.declined else recorded_reason(error)
    if run.outcome is None:
        release_or_park(owned, reason)
        return
    if undone:
        ownership.record(owned, run.outcome)
    run.is_committed = True


def _raise_unless_rolled_back(error: Exception, phase: Phase, ended_itself: bool, owned: Ownership) -> None:
    """Raise the error for a transaction that did not simply roll back. Release or park the claim if that is safe."""
    store, of_database = owned.store, isinstance(error, (DatabaseError, InterfaceError))
    if ended_itself:
        # It is not known what the operation has committed, so it must not run again automatically.
        end(owned, ownership.park, recorded_reason(error), signals.parked)
        raise _ended_itself(owned) from error
    if phase is Phase.COMMITTING and not store.commit_was_refused(error):
        # The COMMIT may have succeeded, so a release could let the operation run twice. The retry reads the record.
        logger.error("COMMIT of operation %r did not say how it ended", owned.scope.operation, exc_info=error)
        raise UnavailableError(
            "The database did not confirm the commit. Retry with the same Idempotency-Key to learn the outcome.",
            retry_after=1,
        ) from error
    # Nothing ran yet, or nothing is wrong with the operation itself: another try may succeed.
    if (phase is Phase.OPENING and of_database) or (phase is Phase.COMMITTING and store.lost_a_race(error)):
        release_or_park(owned, recorded_reason(error))
        raise unavailable(owned.using, error) from error


@contextmanager
def _in_autocommit(run: Running, outcome_of_error: Callable[[Exception], Outcome | None]) -> Iterator[None]:
    owned, reason = run.claim.ownership, None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - each error is either recorded or raised again
        run.outcome = _outcome_of_error(error, run, outcome_of_error)
        reason = None if owned.declined else recorded_reason(error)
    if run.outcome is None:
        release_or_park(owned, reason)
        return
    # If the process dies before this COMMIT, or the COMMIT fails, there may be an effect without an outcome. The
    # claim is not released. When the lease is over, recovery does what the operation declares.
    ownership.record(owned, run.outcome)
    run.is_committed = True


def _outcome_of_error(
    error: Exception, run: Running, outcome_of_error: Callable[[Exception], Outcome | None]
) -> Outcome | None:
    """Turn an exception of the operation into an outcome. If it is a crash, release or park the claim, and raise it.

    An error of this attempt itself (its lease was lost, or the database failed) is never an outcome. An error of
    another claim, such as a ``claim()`` block in the handler, counts as an exception of the handler.
    """
    owned = run.claim.ownership
    if isinstance(error, IdempotencyError) and error is not run.foreign_error:
        release_or_park(owned, recorded_reason(error))
        raise error
    try:
        return outcome_of_error(error)
    except Exception as unhandled:  # the project's handler may raise anything; the error is raised again
        run.note_error(unhandled)
        release_or_park(owned, recorded_reason(error))
        raise


def _complete(owned: Ownership, outcome: Outcome) -> None:
    """Complete within the attempt's own transaction."""
    if owned.store.connection.needs_rollback:
        raise _broken(owned)
    try:
        ownership.complete(owned, outcome, commit=True)
    except (DatabaseError, InterfaceError) as error:
        if owned.store.was_broken_before(error):
            raise _broken(owned) from error
        raise unavailable(owned.using, error) from error


def _broken(owned: Ownership) -> TransactionBrokenError:
    return TransactionBrokenError(
        f"{owned.policy.operation} returned a response although its transaction had been marked for rollback or broken "
        f"by a database error, so nothing it wrote could be kept. Let the error propagate, or run the "
        f"statement that may fail in an atomic() of its own."
    )


def _ended_itself(owned: Ownership) -> TransactionBrokenError:
    return TransactionBrokenError(
        f"{owned.policy.operation} has ended its transaction itself, by a COMMIT or ROLLBACK that bypassed Django, so "
        f"its outcome could not be committed together with its writes. It is parked until an operator has found out "
        f"what was committed. Remove the statement, or declare the operation with transaction=False."
    )


def release_or_park(owned: Ownership, reason: str | None = None) -> None:
    """End an attempt that recorded no outcome, as its operation declares.

    The claim is released if it is safe to run again at once: all writes were in one transaction with the record, or
    REEXECUTE is declared. Otherwise the attempt may have taken effect. A PARK operation is parked. An operation with a
    reconciler keeps its claim, because its call may still be on its way; the reconciler is asked when the lease is
    over. Never raises, because the error that ended the attempt matters more, and the lease ends by itself.

    :param reason: why the attempt failed, for the record; None if it answered with a status that is not recorded.
    """
    policy = owned.policy
    # After a lost lease this is harmless, because both changes are fenced and match no row.
    undone = policy.transaction and not owned.has_effects_elsewhere
    if undone or policy.recovery is Recovery.REEXECUTE:
        declined = owned.declined and reason is None  # without a reason, the answer is what ended the attempt
        end(owned, ownership.release, reason, signals.unrecorded if declined else signals.released)
    elif policy.recovery is Recovery.PARK:
        end(owned, ownership.park, reason, signals.parked)


def end(owned: Ownership, change: Callable[[Ownership, str | None], bool], reason: str | None, signal: Signal) -> None:
    """Release or park the claim, and announce it. Never raises, because the lease ends by itself."""
    try:
        ended = change(owned, reason)
    except (DatabaseError, InterfaceError, IdempotencyError):
        logger.warning(
            "Operation %r: attempt %d could not be released; its lease runs out by itself",
            owned.scope.operation,
            owned.attempt,
            exc_info=True,
        )
        return
    if ended:
        signals.send(signal, owned.policy.operation, owned.scope, owned.attempt)
