"""Run a callable under a claim, so that its effects and its outcome stand or fall together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from django.db import DatabaseError, InterfaceError, connections, transaction

from .. import signals, sql
from ..exceptions import IdempotencyError, InProgressError, LeaseLostError, TransactionBrokenError, UnavailableError
from ..fingerprint import Payload
from ..lifecycle import Recovery
from ..operation import Operation
from ..outcome import Outcome
from ..policy import Wait
from ..scope import Scope
from . import claims
from .claims import Claim
from .context import claim_in_context
from .faults import fault_point
from .heartbeat import heartbeat
from .recovery import settle

logger = logging.getLogger("idempotency")

#: How often a waiting duplicate looks for the outcome, in seconds: soon at first, then at a pace that costs little.
FIRST_POLL = 0.02
SLOWEST_POLL = 0.5


def acquire_or_wait(operation: Operation, scope: Scope, payload: Payload) -> Claim | Outcome:
    """Own the scope or learn the outcome, after whatever waiting and recovery the operation declares.

    Raises what ``claims.acquire`` raises.
    """
    deadline = time.monotonic() + (operation.in_progress.seconds if isinstance(operation.in_progress, Wait) else 0)
    pause = FIRST_POLL
    while True:
        try:
            held = claims.acquire(operation, scope, payload)
            if isinstance(held, Claim) and held.abandoned:
                outcome = settle(held)
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


@dataclass
class Slot:
    """Where the code under a claim leaves what is to be recorded. None: nothing of this run is to be kept.

    ``explain`` is asked about an exception of the block, after the block's writes are rolled back. True: it is an
    answer, whose outcome (or None) ``explain`` has left in the slot. False: it is a crash, and is raised on.
    """

    outcome: Outcome | None = None
    explain: Callable[[Exception], bool] = lambda error: False


@contextmanager
def run_under(claim: Claim) -> Iterator[Slot]:
    """Run the block as the claim's attempt, and record the outcome it leaves in the slot.

    With ``transaction=True`` the block is one transaction of the record's database, and the completing update is its
    last statement: business state and outcome are both there or neither is. A block that raises, or leaves no
    outcome, is rolled back and the claim is released. Without, the outcome is recorded right after the block.

    :raises LeaseLostError: another attempt owns the record; this one's writes are rolled back.
    :raises UnavailableError: the outcome could not be recorded, or COMMIT failed without saying how it ended.
    :raises TransactionBrokenError: the block swallowed a database error and went on.
    """
    token = claim_in_context.set(claim)
    try:
        with heartbeat(claim), _in_transaction(claim) if claim.operation.transaction else _in_autocommit(claim) as slot:
            fault_point("handler.before")
            yield slot
    except LeaseLostError:
        signals.send(signals.lease_lost, claim.operation, claim.scope, claim.attempt)
        raise
    finally:
        claim_in_context.reset(token)
    if slot.outcome is not None:
        fault_point("complete.committed")
        signals.send(signals.completed, claim.operation, claim.scope, claim.attempt)


@contextmanager
def _in_transaction(claim: Claim) -> Iterator[Slot]:
    slot = Slot()
    begun = committing = undone = False
    try:
        with transaction.atomic(using=claim.using, durable=True):
            if claim.operation.idle_timeout is not None:
                # A statement that outlives the lease is one whose attempt will have been taken over.
                sql.backend(claim.using).bound_transaction(
                    claim.using, idle=claim.operation.idle_timeout, statement=claim.operation.lease
                )
            begun = True
            yield slot
            if slot.outcome is None:
                transaction.set_rollback(True, using=claim.using)
            elif connections[claim.using].needs_rollback and slot.outcome.status >= 400:
                undone = True  # the handler undid its writes to answer with a failure: set_rollback(True), or an error
            else:
                _complete(claim, slot.outcome)
                committing = True
    except Exception as error:
        # A BaseException (the worker is told to exit) passes by and releases nothing: a dying process makes no
        # promises, and the lease runs out by itself.
        if committing and not sql.backend(claim.using).commit_was_refused(error):
            if not isinstance(error, (DatabaseError, InterfaceError)):
                raise  # an on_commit callback failed; everything is committed, and the retry replays it
            # COMMIT was sent and its answer never came: it may have happened. Releasing now could run the operation
            # twice. The retry reads the record and finds out.
            logger.exception("COMMIT of operation %r did not say how it ended", claim.operation.name)
            raise UnavailableError(
                "The database did not confirm the commit. Retry with the same Idempotency-Key to learn the outcome.",
                retry_after=1,
            ) from error
        if not begun and isinstance(error, (DatabaseError, InterfaceError)):
            release_or_park(claim)
            raise UnavailableError(retry_after=1) from error  # the store is gone or busy, and nothing has run
        if not _explained(claim, slot, error):
            raise
        undone = True
    if slot.outcome is None:
        release_or_park(claim)
    elif undone:
        claims.record(claim, slot.outcome)


@contextmanager
def _in_autocommit(claim: Claim) -> Iterator[Slot]:
    slot = Slot()
    try:
        yield slot
    except Exception as error:
        if not _explained(claim, slot, error):
            raise
    if slot.outcome is None:
        release_or_park(claim)
    else:
        # Dies before this COMMIT, or fails in it: the effect may be there without its outcome. Nothing is given up;
        # the lease runs out and recovery does what the operation declares.
        claims.record(claim, slot.outcome)


def _explained(claim: Claim, slot: Slot, error: Exception) -> bool:
    slot.outcome = None
    try:
        explained = not isinstance(error, IdempotencyError) and slot.explain(error)
    except Exception:  # raised on: only the claim is given up first, whatever the project's handler failed with
        release_or_park(claim)
        raise
    if not explained:
        release_or_park(claim)
    return explained


def _complete(claim: Claim, outcome: Outcome) -> None:
    """Complete within the block's own transaction."""
    if connections[claim.using].needs_rollback:
        raise _broken(claim)
    try:
        claims.complete(claim, outcome)
    except (DatabaseError, InterfaceError) as error:
        if sql.backend(claim.using).was_broken_before(error):
            raise _broken(claim) from error
        raise UnavailableError(retry_after=1) from error


def _broken(claim: Claim) -> IdempotencyError:
    return TransactionBrokenError(
        f"Operation {claim.operation.name!r} returned a response although its transaction had been marked for rollback "
        f"or broken by a database error, so nothing it wrote could be kept. Let the error propagate, or run the "
        f"statement that may fail in an atomic() of its own."
    )


def release_or_park(claim: Claim) -> None:
    """End an attempt that recorded nothing, as far as its operation lets us say what that means.

    In one transaction with the record, or with REEXECUTE declared, another run is safe and may come at once. A PARK
    operation that ended without an outcome may have had its effect. So may one with a reconciler, and what it sent may
    even be on its way still: it keeps its claim, and the reconciler is asked when the lease is over. Never raises:
    what ended the attempt matters more, and a claim that could not be given up is recovered when its lease is over.
    """
    operation = claim.operation
    try:  # after a lost lease too: both are fenced, and match nothing then
        if operation.transaction or operation.recovery is Recovery.REEXECUTE:
            given_up, signal = claims.release(claim), signals.released
        elif operation.recovery is Recovery.PARK:
            given_up, signal = claims.park(claim), signals.parked
        else:
            return
    except (DatabaseError, InterfaceError):
        logger.warning(
            "Operation %r: attempt %d could not be released; its lease runs out by itself",
            operation.name,
            claim.attempt,
            exc_info=True,
        )
        return
    if given_up:
        signals.send(signal, operation, claim.scope, claim.attempt)
