"""Runs an operation under a claim, so that its effects and its outcome are committed together or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Final

from django.db import DatabaseError, InterfaceError, connections, transaction
from django.dispatch import Signal

from .. import foreign, signals
from ..exceptions import (
    IdempotencyError,
    LeaseLostError,
    OuterTransactionError,
    TransactionBrokenError,
    UnavailableError,
)
from ..lifecycle import Recovery
from ..operation import Operation
from ..outcome import Outcome, recorded_reason
from ..store import (
    CommitError,
    is_refusal_to_nest,
    is_transaction_open,
    open_transactions,
    undo_left_open,
)
from . import ownership
from .claim import Claim
from .context import claim_in_context
from .faults import fault_point
from .ownership import End, Ownership, unavailable
from .renewal import heartbeat

logger: Final = logging.getLogger("idempotency")

_NO_HEARTBEAT: Final[AbstractContextManager[None]] = nullcontext()


def _crash(error: Exception) -> Outcome | None:
    raise error


@contextmanager
def running(claim: Claim, outcome_of_error: Callable[[Exception], Outcome | None] = _crash) -> Iterator[None]:
    """Run the block under the claim, and record the outcome that it sets in ``claim.ownership``.

    With ``transaction=True`` the block runs in one transaction of the record's database, and the completing update is
    the last statement: business state and outcome are committed together or not at all. If the block raises an error or
    sets no outcome, it is rolled back and the claim is released. With ``transaction=False`` the block may begin that
    transaction by ``Claim.begin()``. If it does not, the outcome is recorded right after the block.

    :param outcome_of_error: called with an exception from the block, after its writes are rolled back. Returns the
        outcome to record, or None to keep nothing, or raises if the exception is a crash.
    :raises LeaseLostError: another attempt owns the record. This attempt's writes are rolled back.
    :raises UnavailableError: the outcome could not be recorded, or the result of COMMIT is unknown.
    :raises TransactionBrokenError: the block continued after a database error, ended its transaction itself, or left
        one open.
    """
    owned = claim.ownership
    claim.outer = claim_in_context.get()
    token = claim_in_context.set(claim)
    locks: list[tuple[ExitStack, Any]] = []
    claim.locks = locks
    try:
        with _NO_HEARTBEAT if owned.policy.heartbeat is None else heartbeat(owned, owned.policy.heartbeat):
            reason = None
            try:
                with _in_transaction(owned) if owned.policy.transaction else _in_autocommit(claim):
                    fault_point["handler.before"]()
                    owned.expected = open_transactions()
                    try:
                        yield
                    except Exception as error:
                        owned.note_error(error)
                        raise
                    finally:
                        found = open_transactions()
                        changed = None if found == owned.expected else undo_left_open(owned.expected, found)
                    if changed is not None:
                        raise left_open(owned.policy.operation, changed)
                    if owned.discarded and owned.outcome is not None:
                        owned.outcome, owned.declined = None, True
            except Exception as error:  # noqa: BLE001 - each error is either recorded or raised again
                # A BaseException, such as SystemExit, is not caught, because a dying process may not be able to release
                # anything. The lease runs out.
                cause = error.error if isinstance(error, CommitError) else error
                reason = _settle(owned, cause, outcome_of_error)
            if owned.end is End.UNKNOWN:
                owned.end = End.COMMITTED  # because COMMIT raised no error
            elif owned.end is not End.COMMITTED:
                _record_or_release(owned, reason)
    except LeaseLostError as error:
        if error is not owned.foreign_error:
            signals.send(signals.lease_lost, owned.policy.operation, owned.scope, owned.attempt)
        raise
    finally:
        claim_in_context.reset(token)
        claim.locks = None
        try:
            if owned.end is End.COMMITTED:  # also if an on_commit callback has failed
                fault_point["complete.committed"]()
                signals.send(signals.completed, owned.policy.operation, owned.fence.scope, owned.fence.attempt)
        finally:
            if locks:
                _release(locks, owned.policy.operation)


def _release(locks: list[tuple[ExitStack, Any]], operation: Operation) -> None:
    """Release the locks of ``hold()``, the last one first. An error in releasing one replaces neither the outcome nor
    the attempt's error.
    """
    while locks:
        lock, ended_by = locks.pop()
        try:
            lock.__exit__(*ended_by)
        except Exception as error:
            if error is not ended_by[1]:
                logger.exception("A lock of %s could not be released after its transaction had ended", operation)
        except BaseException:
            _release(locks, operation)
            raise


@contextmanager
def _in_transaction(owned: Ownership) -> Iterator[None]:
    """Run the block in the transaction of the record's database that also records the attempt's outcome."""
    store, using = owned.store, owned.store.using
    ownership.stay_in_session(owned)
    watch = store.watch_transaction()
    # The handler may call begin() within execute_wrapper(), which removes the last wrapper at its end.
    watch.is_outermost = not owned.policy.transaction
    block = transaction.atomic(using=using, durable=True)
    try:
        with block:
            if not owned.shares_connection:  # a TestCase runs no callbacks, and its tests may inspect them
                store.connection.on_commit(owned.note_commit)  # before all callbacks of the operation
            owned.end = End.ROLLED_BACK
            try:
                with watch:
                    yield
            finally:
                if watch.ended or foreign.atomic_blocks(store.connection)[-1:] != [block]:
                    owned.end = End.ENDED_ITSELF
            if owned.end is End.ENDED_ITSELF:
                raise _ended_itself(owned)  # so that an open transaction rolls back
            if owned.outcome is None:
                transaction.set_rollback(True, using=using)
            elif owned.outcome.status < 400 or not foreign.needs_rollback(store.connection):
                _complete(owned, owned.outcome)
            # Otherwise the handler returned a failure after set_rollback(True) or a database error.
    except Exception:  # of the operation or the database: it is only examined, and raised again
        if owned.end is End.ROLLED_BACK and watch.has_committed():
            owned.end = End.ENDED_ITSELF
        raise


@contextmanager
def _in_autocommit(claim: Claim) -> Iterator[None]:
    """Run the block in autocommit, until it calls ``Claim.begin()``.

    If the process dies before the outcome is committed, or its COMMIT fails, there may be an effect without an outcome.
    The claim is not released. When the lease is over, it is recovered as the operation declares.
    """
    claim.ownership.end = End.ROLLED_BACK
    with ExitStack() as transactions:
        claim.enter_transaction = partial(_begin, claim, transactions)
        try:
            yield
        finally:
            claim.enter_transaction = None


def _begin(claim: Claim, transactions: ExitStack) -> None:
    """Implements ``Claim.begin``. ``transactions`` ends the transaction.

    If the process dies before the COMMIT, nothing is written, and the claim is recovered as the operation declares. If
    it slept before this until another attempt took over, the renewal matches no row. If it sleeps after that, the
    completing update matches none, and the transaction is rolled back.
    """
    owned = claim.ownership
    operation, using = owned.policy.operation, owned.using
    if not is_here(claim):
        raise RuntimeError(
            f"begin() of {operation} was called by another thread, a coroutine, or code within another claim. Call it "
            f"in the thread that runs the handler. An async handler calls: await sync_to_async(claim.begin)()."
        )
    if is_transaction_open(using):
        raise OuterTransactionError(
            f"begin() of {operation} was called inside an open transaction of database {using!r}. Call it outside of "
            f"atomic(), which is a savepoint after it."
        )
    # The connection may have been lost while the handler called other services. A renewal replaces it.
    claim.renew()
    fault_point["begin.before"]()
    with ownership.on_behalf_of(owned), ownership.store_errors(using):
        transactions.enter_context(_in_transaction(owned))
    owned.has_begun = True
    owned.expected[using] = open_transactions()[using]
    fault_point["begin.after"]()


def is_here(claim: Claim) -> bool:
    """Whether the calling code runs under this claim, on its connection. A context may be copied to another thread."""
    owned = claim.ownership
    return claim_in_context.get() is claim and connections[owned.using] is owned.store.connection


def _settle(owned: Ownership, error: Exception, outcome_of_error: Callable[[Exception], Outcome | None]) -> str | None:
    """Settle the record after an error in or after the attempt's transaction.

    :returns: the reason to record, for a transaction that was rolled back because of the operation.
    """
    store = owned.store
    of_database = isinstance(error, (DatabaseError, InterfaceError))
    match owned.end:
        case End.COMMITTED:
            # Completed: an on_commit callback has failed, and a retry replays the committed outcome.
            owned.foreign_error = error
            raise error
        case End.ENDED_ITSELF:
            # Parked, because it must not run again automatically.
            settle_record(owned, ownership.park, recorded_reason(error), signals.parked)
            raise _ended_itself(owned) from error
        case End.UNKNOWN if not store.commit_was_refused(error):
            # Left as it is. The COMMIT may have succeeded, so a release could let the operation run twice.
            logger.error("The result of the COMMIT of %s is unknown", owned.scope, exc_info=error)
            raise UnavailableError(
                "The database did not confirm the commit. Retry with the same Idempotency-Key to learn the outcome.",
                retry_after=1,
            ) from error
        case End.NOT_BEGUN | End.UNKNOWN if of_database and (owned.end is End.NOT_BEGUN or store.lost_a_race(error)):
            # Released, because the operation itself is not at fault: another try may succeed.
            release_or_park(owned, recorded_reason(error))
            raise unavailable(owned.using, error) from error
        case _:
            # Completed with the operation's failure, released, or parked.
            owned.end = End.ROLLED_BACK
            if (owned.policy.transaction or owned.has_begun) and (
                store.was_refused_in_transaction(error) or is_refusal_to_nest(error)
            ):
                misplaced = _misplaced(owned, error)
                misplaced.__cause__ = error
                error = misplaced
            return _outcome_of_error(owned, error, outcome_of_error)


def _record_or_release(owned: Ownership, reason: str | None) -> None:
    if owned.outcome is None:
        release_or_park(owned, reason)
    else:
        ownership.record(owned, owned.outcome)
        owned.end = End.COMMITTED


def _outcome_of_error(
    owned: Ownership, error: Exception, outcome_of_error: Callable[[Exception], Outcome | None]
) -> str | None:
    """Turn an exception from the operation into an outcome. If it is a crash, release or park the claim, and raise it.

    An error of this attempt itself (its lease was lost, or the database failed) is never an outcome. An error of
    another claim, such as a ``claim()`` block in the handler, counts as an exception from the handler.

    :returns: the reason to record; None if the operation declares the status as not recordable.
    """
    if isinstance(error, IdempotencyError) and error is not owned.foreign_error:
        release_or_park(owned, recorded_reason(error))
        raise error
    try:
        owned.outcome = outcome_of_error(error)
    except Exception as unhandled:  # the project's handler may raise anything; the error is raised again
        owned.note_error(unhandled)
        release_or_park(owned, recorded_reason(error))
        raise
    return None if owned.declined else recorded_reason(error)


def _complete(owned: Ownership, outcome: Outcome) -> None:
    """Complete within the attempt's own transaction."""
    if foreign.needs_rollback(owned.store.connection):
        raise _broken(owned)
    try:
        ownership.complete(owned, outcome, commit=True)
    except CommitError:
        owned.end = End.UNKNOWN
        raise
    except (DatabaseError, InterfaceError) as error:
        if owned.store.was_broken_before(error):
            raise _broken(owned) from error
        if owned.store.was_read_only(error):
            raise _misplaced(owned, error) from error
        raise unavailable(owned.using, error, completing=owned.policy.operation) from error
    owned.end = End.UNKNOWN


def _broken(owned: Ownership) -> TransactionBrokenError:
    return TransactionBrokenError(
        f"{owned.policy.operation} returned a response although its transaction had been marked for rollback or broken "
        f"by a database error, so nothing it wrote could be kept. Let the error propagate, or run the "
        f"statement that may fail in a separate atomic() block."
    )


def _misplaced(owned: Ownership, error: Exception) -> TransactionBrokenError:
    return TransactionBrokenError(
        f"{owned.policy.operation} needs another transaction than its own, in which its record is completed and each "
        f"atomic() block is a savepoint ({type(error).__name__}: {str(error).partition(chr(10))[0]}). Set an isolation "
        f"level by the handler's first statement, outside of atomic(). Let clients retry instead of a block that "
        f"retries after serialization failures. Make only an inner atomic() READ ONLY. Or declare the operation with "
        f"transaction=False."
    )


def left_open(operation: Operation, using: str) -> TransactionBrokenError:
    return TransactionBrokenError(
        f"{operation} left a transaction of database {using!r} open: it entered an atomic() block that it did not "
        f"exit, or switched autocommit off. What it wrote there was rolled back. Use atomic() as a decorator or in a "
        f"with statement, and switch autocommit on again."
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
    reconciler keeps its claim, because its call may still be in transit; the reconciler is called when the lease is
    over. Never raises, because the error that ended the attempt matters more, and the lease ends by itself.

    :param reason: why the attempt failed, for the record; None if it returned a status that is not recorded.
    """
    policy = owned.policy
    # After a lost lease this is harmless, because both changes are fenced and match no row.
    if policy.transaction or policy.recovery is Recovery.REEXECUTE:
        declined = owned.declined and reason is None  # without a reason, the status ended the attempt
        settle_record(owned, ownership.release, reason, signals.unrecorded if declined else signals.released)
    elif policy.recovery is Recovery.PARK:
        settle_record(owned, ownership.park, reason, signals.parked)


def settle_record(
    owned: Ownership, change: Callable[[Ownership, str | None], bool], reason: str | None, signal: Signal
) -> None:
    """Release or park the claim, and announce it. Never raises, because the lease ends by itself."""
    try:
        ended = change(owned, reason)
    except (DatabaseError, InterfaceError, IdempotencyError):
        logger.warning(
            "Attempt %d of %s could not be released; its lease runs out by itself",
            owned.attempt,
            owned.scope,
            exc_info=True,
        )
        return
    if ended:
        signals.send(signal, owned.policy.operation, owned.scope, owned.attempt)
