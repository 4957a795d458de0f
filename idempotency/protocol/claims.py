"""Claim, take over, complete, release, park: each one statement, each a compare-and-set.

Who owns a record is decided here and nowhere else. Every change of an owned record is fenced: it names the whole
scope, the row, the attempt and the payload's fingerprint, and matches nothing once another attempt owns the record.

Why the fence is that wide. The row's id and attempt would do while the database never forgets. But a first claim may
commit without waiting for the disk (see ``_insert``), and a database that crashes can then forget the claim *and*
hand its id out again, to another key, at attempt 1. With the scope and the fingerprint in the fence, a claimant that
survived such a crash can only ever match a claim of the same operation with the same payload, where its completing is
as right as the other's, and only one of the two can.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

from django.db import DatabaseError, IntegrityError, InterfaceError, connections, transaction
from django.dispatch import Signal

from .. import signals, sql
from ..conf import settings
from ..exceptions import InProgressError, KeyReusedError, LeaseLostError, OutcomeUnknownError
from ..identity.fingerprint import Payload
from ..identity.scope import Scope
from ..lifecycle import Decision, Recovery, Status, decide
from ..models import IdempotencyRecord
from ..operation import Operation
from ..outcome import Outcome
from ..sql import Row, Store
from . import steps
from .changes import fenced_change
from .faults import fault_point
from .ownership import Ownership, on_behalf_of
from .transactions import alias, own_transaction, store_errors, unavailable

#: A claim starts again when the record changed under it: purged after the insert met it, taken over by another, or
#: (REPEATABLE READ, InnoDB) refused as a serialization failure or a deadlock. Each round needs another process to have
#: moved in between, so more than a few in a row means trouble that waiting doesn't cure.
MAX_ROUNDS = 8


@dataclass(frozen=True)
class ClaimRequest:
    """What somebody wants to claim, and where."""

    operation: Operation
    scope: Scope
    payload: Payload
    using: str

    @cached_property
    def store(self) -> Store:
        return sql.store(self.using)

    def own_transaction(self, *, one_statement: bool = True) -> AbstractContextManager[None]:
        return own_transaction(self.using, f"Operation {self.operation.name!r}", one_statement=one_statement)

    def owned(self, record_id: int, attempt: int, request_hash: str) -> Ownership:
        return Ownership(self.operation, self.scope, record_id, attempt, request_hash, self.using)


def acquire(operation: Operation, scope: Scope, payload: Payload) -> Ownership | Outcome:
    """Own the scope, or learn what has become of it.

    :returns: an ``Ownership`` when this caller is to run the operation, or, if it is ``abandoned``, to find out first
        what became of the attempt before; the ``Outcome`` when it has run already.
    :raises InProgressError: another attempt is alive.
    :raises KeyReusedError: the key belongs to another payload.
    :raises OutcomeUnknownError: an attempt was cut off and nobody knows how it ended.
    :raises UnavailableError: the store can't be reached or written. Nothing ran.
    :raises OuterTransactionError: the caller holds a transaction open, in which a claim could not be committed.
    """
    request = ClaimRequest(operation, scope, payload, alias())
    for _ in range(MAX_ROUNDS):
        try:
            settled = _one_round(request)
        except (DatabaseError, InterfaceError) as error:
            if request.store.lost_a_race(error):
                continue
            if request.store.timed_out_waiting(error):
                # The row is locked: its owner is about to commit, or frozen in the act. Either way it is not ours.
                raise InProgressError(retry_after=1) from error
            raise unavailable(request.using, error) from error
        if settled is not None:
            return settled
    raise InProgressError(retry_after=1)


def _one_round(request: ClaimRequest) -> Ownership | Outcome | None:
    """Try the insert, then whatever the record found calls for. None: it changed meanwhile, look again."""
    # An insert waits while the database's one writer is at work, and that may be the attempt which a duplicate is to be
    # told of. A read waits for nobody.
    row = request.store.read(request.scope) if request.store.has_one_writer else None
    if row is None:
        if (owned := _insert(request)) is not None:
            return owned
        row = request.store.read(request.scope)
    if row is None:
        return None  # it was purged after the insert had met it
    decision = decide(
        row.status,
        lease_over=row.lease_over,
        retention_over=row.retention_over,
        same_payload=request.payload.matches(row.request_hash),
        recovery=request.operation.recovery,
    )
    return _ANSWERS[decision](request, row)


def _insert(request: ClaimRequest) -> Ownership | None:
    """Claim a scope that has no record.

    The claim is committed before anything runs, so that every other process sees it; the unique constraint lets one
    insert win. If the process dies before the COMMIT, nothing was claimed. If it dies after it, the lease runs out and
    the claim is recovered. If it sleeps for an hour after it, another attempt takes over, and everything that this one
    does later is fenced.

    Where losing the claim is harmless the COMMIT needn't wait for the disk: with transaction=True and REEXECUTE no
    effect can be durable without the claim, because the effects' own COMMIT comes later in the same log.
    """
    operation = request.operation
    fault_point("claim.before")
    try:
        with request.own_transaction():
            record_id = request.store.insert_claim(
                request.scope,
                request.payload.request_hash,
                lease=operation.lease,
                ttl=operation.ttl,
                wait_for_disk=not (operation.transaction and operation.recovery is Recovery.REEXECUTE),
            )
            fault_point("claim.sent")
    except IntegrityError as error:
        if not request.store.is_duplicate(error):
            raise
        return None
    if record_id is None:
        return None
    fault_point("claim.committed")
    return _announced(request.owned(record_id, 1, request.payload.request_hash), signals.claimed)


# What each decision about a record that was found leads to. None: the record has changed, look again.


def _replay(request: ClaimRequest, row: Row) -> Outcome | None:
    fault_point("replay.read")
    signals.send(signals.replayed, request.operation, request.scope, row.attempt)
    return row.outcome


def _take_over(request: ClaimRequest, row: Row) -> Ownership | None:
    # Fenced on the attempt just read, so of many who saw the same abandoned claim one wins; and the lease is judged
    # again, so a claim renewed since the read is left alone. Who slept since the read finds its attempt gone.
    # Waits for the disk: unlike a first claim, a take-over that a crash forgets could be handed out twice.
    with request.own_transaction():
        won = request.store.take_over(request.scope, row, lease=request.operation.lease, ttl=request.operation.ttl)
        fault_point("takeover.sent")
    if not won:
        return None
    was_released = row.status is Status.RECOVERABLE
    return _announced(
        request.owned(row.id, row.attempt + 1, row.request_hash),
        signals.claimed if was_released else signals.taken_over,
    )


def _reconcile(request: ClaimRequest, row: Row) -> Ownership | None:
    owned = _take_over(request, row)
    if owned is not None:
        owned.abandoned = True
    return owned


def _start_over(request: ClaimRequest, row: Row) -> Ownership | None:
    operation, request_hash = request.operation, request.payload.request_hash
    with request.own_transaction(one_statement=False):
        # The steps of the request before; undone with the claim if another one wins it.
        steps.forget(request.using, request.scope, row.id)
        won = request.store.start_over(request.scope, row, request_hash, lease=operation.lease, ttl=operation.ttl)
        if not won:
            transaction.set_rollback(True, using=request.using)
    return _announced(request.owned(row.id, row.attempt + 1, request_hash), signals.claimed) if won else None


def _park(request: ClaimRequest, row: Row) -> None:
    with request.own_transaction():
        won = request.store.park_abandoned(request.scope, row)
    if won:
        signals.send(signals.parked, request.operation, request.scope, row.attempt)
    # Parked by this caller or another, or settled by its owner after all: the next round reads which.


def _refuse_in_progress(request: ClaimRequest, row: Row) -> None:
    raise InProgressError(retry_after=retry_after(row, request.operation))


def _refuse_reused(request: ClaimRequest, row: Row) -> None:
    signals.send(signals.key_reused, request.operation, request.scope, row.attempt)
    raise KeyReusedError


def _refuse_parked(request: ClaimRequest, row: Row) -> None:
    raise OutcomeUnknownError


_ANSWERS: dict[Decision, Callable[[ClaimRequest, Row], Ownership | Outcome | None]] = {
    Decision.REPLAY: _replay,
    Decision.WAIT: _refuse_in_progress,
    Decision.REFUSE_REUSED: _refuse_reused,
    Decision.TAKE_OVER: _take_over,
    Decision.START_OVER: _start_over,
    Decision.RECONCILE: _reconcile,
    Decision.PARK: _park,
    Decision.REPORT_PARKED: _refuse_parked,
}


def _announced(owned: Ownership, signal: Signal) -> Ownership:
    owned.shares_connection = connections[owned.using].in_atomic_block  # only a TestCase's gets here
    signals.send(signal, owned.operation, owned.scope, owned.attempt)
    return owned


def complete(owned: Ownership, outcome: Outcome) -> None:
    """Record the outcome, if the attempt still owns the record. The last statement of the business transaction.

    If the process dies before the COMMIT, neither the business writes nor the outcome exist. If it dies after it, both
    do. If it slept before it until another attempt took over, no row matches, and the caller's transaction must roll
    back.

    :raises LeaseLostError: the record is not this attempt's any more.
    """
    if not sql.store(owned.using).complete(owned.fence, outcome, ttl=owned.operation.ttl):
        owned.lost = True
        raise owned.lost_error()
    fault_point("complete.sent")


def record(owned: Ownership, outcome: Outcome) -> None:
    """Record an outcome in a transaction of its own.

    :raises LeaseLostError: another attempt owns the record.
    :raises UnavailableError: it could not be recorded, or may have been.
    """
    with on_behalf_of(owned), store_errors(owned.using):
        try:
            fenced_change(owned, lambda: complete(owned, outcome))
        except LeaseLostError:
            # Unless the COMMIT of an earlier try was carried out and its answer was lost with the connection.
            row = sql.store(owned.using).read(owned.scope)
            if row is None or (row.attempt, row.outcome) != (owned.attempt, outcome):
                raise


def release(owned: Ownership) -> bool:
    """Give the claim up so that a retry runs at once. Only for a run that is known to have had no effect.

    False where another attempt owns the record by now: its claim is not this one's to free.
    """
    fault_point("release.before")

    def change() -> bool:
        released = sql.store(owned.using).release(owned.fence)
        fault_point("release.sent")
        return released

    return fenced_change(owned, change)


def park(owned: Ownership) -> bool:
    """Stop automatic handling: the attempt ended and nobody can say whether it took effect."""
    return fenced_change(owned, lambda: sql.store(owned.using).park(owned.fence))


def postpone(owned: Ownership, duration: timedelta) -> bool:
    """Leave the record to whoever comes after ``duration``: what became of it is not known yet."""
    return fenced_change(
        owned, lambda: sql.store(owned.using).set_lease(owned.fence, duration, ttl=owned.operation.ttl)
    )


def read_winner(owned: Ownership, payload: Payload) -> Outcome:
    """What an attempt that lost its lease answers with: the winner's outcome.

    :raises InProgressError: there is none yet.
    :raises UnavailableError: the store can't be read.
    """
    with store_errors(owned.using):
        row = sql.store(owned.using).read(owned.scope)
    if row is not None and row.outcome is not None and payload.matches(row.request_hash):
        return row.outcome
    raise InProgressError(retry_after=1)


def retry_after(row: Row, operation: Operation) -> int:
    """Whole seconds: as long again as the attempt has been running, within the lease and ``MAX_RETRY_AFTER``.

    A retry of a request that takes milliseconds comes back in a second; retries of a long one thin out.
    """
    running_for = operation.lease.total_seconds() - row.lease_left
    bound = min(row.lease_left, settings.max_retry_after.total_seconds())
    return max(1, math.ceil(min(running_for, bound)))


def take_over_abandoned(operation: Operation, record: IdempotencyRecord, using: str) -> Ownership | None:
    """Own a record that a sweep found abandoned. None where another one was faster, or its owner lives after all."""
    row = Row(
        id=record.pk,
        attempt=record.attempt,
        status=Status(record.status),
        request_hash=record.request_hash,
        lease_left=0.0,
        retention_over=False,
        outcome=None,
    )
    return _reconcile(ClaimRequest(operation, record.scope, Payload(None), using), row)
