"""Claim, take over, complete, release, park: each one statement, each a compare-and-set.

Who owns a record is decided here and nowhere else. Every change of an owned record is fenced: it names the whole
scope, the row, the attempt and the payload's fingerprint, and matches nothing once another attempt owns the record.

Why the fence is that wide. The row's id and attempt would do while the database never forgets. But a first claim may
commit without waiting for the disk (see ``acquire``), and a database that crashes can then forget the claim *and*
hand its id out again, to another key, at attempt 1. With the scope and the fingerprint in the fence, a claimant that
survived such a crash can only ever match a claim of the same operation with the same payload, where its completing is
as right as the other's, and only one of the two can.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar
from uuid import UUID

from django.db import DatabaseError, IntegrityError, InterfaceError, OperationalError, connections, router, transaction
from django.dispatch import Signal

from .. import signals, sql
from ..conf import settings
from ..exceptions import (
    InProgressError,
    KeyReusedError,
    LeaseLostError,
    OutcomeUnknownError,
    OuterTransactionError,
    UnavailableError,
)
from ..fingerprint import Payload
from ..lifecycle import Decision, Recovery, Status, decide
from ..models import IdempotencyRecord
from ..operation import Operation
from ..outcome import Outcome
from ..scope import Scope
from ..sql import Fence, Row
from . import steps
from .faults import fault_point

#: A claim starts again when the record changed under it: purged after the insert met it, taken over by another, or
#: (REPEATABLE READ, InnoDB) refused as a serialization failure or a deadlock. Each round needs another process to have
#: moved in between, so more than a few in a row means trouble that waiting doesn't cure.
MAX_ROUNDS = 8

T = TypeVar("T")


@dataclass
class Claim:
    """One attempt's ownership of a record, as its handler sees it through ``current_claim()``.

    ``attempt`` is the fencing number. ``reference`` may be set by the handler of an operation that declares
    ``rebuild``: it is recorded in place of the response's body.
    """

    operation: Operation
    scope: Scope
    record_id: int
    attempt: int
    request_hash: str
    using: str = field(repr=False)
    #: The claim before this one disappeared, and what became of it must be found out before anything runs.
    abandoned: bool = field(default=False, repr=False)
    #: Set once it is known that another attempt owns the record, or that the lease could not be kept.
    lost: bool = field(default=False, repr=False)
    #: True in a TestCase, whose transaction hides the record from every other connection.
    shares_connection: bool = field(default=False, repr=False)
    reference: str | None = None
    #: The step that is running, if one is.
    running_step: str = field(default="", init=False, repr=False)
    _calls: Counter[str] = field(default_factory=Counter, init=False, repr=False)

    def renew(self) -> None:
        """Prolong the lease: from now, for the operation's ``lease``.

        A sign of life of a handler that takes longer than its lease. Committed at once, on a connection of its own if
        the handler's has a transaction open.

        :raises LeaseLostError: another attempt has taken over. Stop before the next effect.
        :raises UnavailableError: the store can't be reached; whether the lease still holds is not known.
        """
        self.ensure_owned()
        if not renew(self):
            self.lost = True
            self.ensure_owned()

    def ensure_owned(self) -> None:
        """Stop here if the lease is known to be lost. Costs nothing; asks nobody.

        :raises LeaseLostError: it is.
        """
        if self.lost:
            raise _lost(self)

    def derive_key(self, name: str) -> UUID:
        """A key for the downstream call ``name``: the same on every attempt and every retry. See ``Scope.derive_key``.

        :raises LeaseLostError: the lease is known to be lost, so the call must not be made.
        """
        self.ensure_owned()
        return self.scope.derive_key(name)

    def derive_text(self, name: str, length: int = 32) -> str:
        """The derived key as ``length`` hexadecimal digits, 16 to 64.

        :raises LeaseLostError: the lease is known to be lost, so the call must not be made.
        """
        self.ensure_owned()
        return self.scope.derive_text(name, length)

    def name_call(self, kind: str) -> str:
        """The name of the next call of a kind, to derive its key from: ``kind``, then ``kind#2``, ``kind#3`` …

        For what can't ask its caller for a name. It is the same on another attempt if that makes the same calls in the
        same order. Calls within a step are counted by themselves, because another attempt may skip the step.
        """
        kind = f"{self.running_step}/{kind}" if self.running_step else kind
        self._calls[kind] += 1
        count = self._calls[kind]
        return kind if count == 1 else f"{kind}#{count}"

    @property
    def trace(self) -> str:
        """What this operation has in common with those that it leads to, and with the one that led to it."""
        return self.scope.trace

    def step(self, name: str, call: Callable[[], T]) -> T:
        """Run one phase of the operation, and keep its result so that another attempt doesn't run it again.

        For an operation with ``transaction=False``. The result must be JSON, and comes back as JSON gives it. An
        attempt that was cut off inside ``call`` leaves nothing: the next one calls it again, so a call to the outside
        must carry ``derive_key``, which is the same then.

        :raises LeaseLostError: another attempt has taken over; ``call`` was not made, or its result is not kept.
        :raises TypeError: the result is not JSON. If ``call`` is annotated as returning something else, it isn't made.
        :raises ImproperlyConfigured: the operation runs in one transaction, which a step could not outlive.
        :raises UnavailableError: the store can't be read or written.
        """
        self.ensure_owned()
        return steps.run_step(self, name, call)

    @property
    def fence(self) -> Fence:
        return Fence(self.scope, self.record_id, self.attempt, self.request_hash)


def alias() -> str:
    """The database that records are written to and read from. A replica may lag behind, so it is never asked."""
    return router.db_for_write(IdempotencyRecord)


def acquire(operation: Operation, scope: Scope, payload: Payload) -> Claim | Outcome:
    """Own the scope, or learn what has become of it.

    :returns: a ``Claim`` when this caller is to run the operation, or, if it is ``abandoned``, to find out first what
        became of the one before; the ``Outcome`` when it has run already.
    :raises InProgressError: another attempt is alive.
    :raises KeyReusedError: the key belongs to another payload.
    :raises OutcomeUnknownError: an attempt was cut off and nobody knows how it ended.
    :raises UnavailableError: the store can't be reached or written. Nothing ran.
    :raises OuterTransactionError: the caller holds a transaction open, in which a claim could not be committed.
    """
    using = alias()
    _refuse_outer_transaction(using, operation)
    for _ in range(MAX_ROUNDS):
        try:
            settled = _one_round(operation, scope, payload, using)
        except OperationalError as error:
            backend = sql.backend(using)
            if backend.lost_a_race(error):
                continue
            if backend.timed_out_waiting(error):
                # The row is locked: its owner is about to commit, or frozen in the act. Either way it is not ours.
                raise InProgressError(retry_after=1) from error
            raise UnavailableError(retry_after=1) from error
        except (DatabaseError, InterfaceError) as error:
            raise UnavailableError(retry_after=1) from error
        if settled is not None:
            return settled
    raise InProgressError(retry_after=1)


def _one_round(operation: Operation, scope: Scope, payload: Payload, using: str) -> Claim | Outcome | None:
    """Try the insert, then whatever the record found calls for. None: it changed meanwhile, look again."""
    backend = sql.backend(using)
    fault_point("claim.before")
    try:
        # Committed before anything runs, so that every other process sees it; one winner by the unique constraint.
        # Dies before the COMMIT: nothing was claimed. Dies after it: the lease runs out and the claim is recovered.
        # Sleeps for an hour after it: another attempt took over, and everything this one does later is fenced.
        #
        # Where losing the claim is harmless the COMMIT needn't wait for the disk: with transaction=True and REEXECUTE
        # no effect can be durable without the claim, because the effects' own COMMIT comes later in the same log.
        with transaction.atomic(using=using, durable=True):
            record_id = backend.insert_claim(
                using,
                scope,
                payload.request_hash,
                lease=operation.lease,
                ttl=operation.ttl,
                wait_for_disk=not (operation.transaction and operation.recovery is Recovery.REEXECUTE),
            )
            fault_point("claim.sent")
    except IntegrityError:
        record_id = None  # the portable insert's way of losing
    if record_id is not None:
        fault_point("claim.committed")
        return _announced(Claim(operation, scope, record_id, 1, payload.request_hash, using), signals.claimed)

    row = backend.read(using, scope)
    if row is None:
        return None  # purged since the insert met it
    decision = decide(
        row.status,
        lease_over=row.lease_over,
        retention_over=row.retention_over,
        same_payload=payload.matches(row.request_hash),
        recovery=operation.recovery,
    )
    if decision is Decision.REPLAY:
        fault_point("replay.read")
        signals.send(signals.replayed, operation, scope, row.attempt)
        return row.outcome
    if decision in {Decision.TAKE_OVER, Decision.RECONCILE}:
        # Fenced on the attempt just read, so of many who saw the same abandoned claim one wins; and the lease is judged
        # again, so a claim renewed since the read is left alone. Who slept since the read finds its attempt gone.
        # Waits for the disk: unlike a first claim, a take-over that a crash forgets could be handed out twice.
        with transaction.atomic(using=using, durable=True):
            won = backend.take_over(using, scope, row, operation.lease)
            fault_point("takeover.sent")
        claim = Claim(operation, scope, row.id, row.attempt + 1, row.request_hash, using)
        claim.abandoned = decision is Decision.RECONCILE
        was_released = row.status is Status.RECOVERABLE
        return _announced(claim, signals.claimed if was_released else signals.taken_over) if won else None
    if decision is Decision.START_OVER:
        new_hash = payload.request_hash
        with transaction.atomic(using=using, durable=True):
            steps.forget(using, scope, row.id)  # of the request before; undone with the claim if another one wins it
            won = backend.start_over(using, scope, row, new_hash, lease=operation.lease, ttl=operation.ttl)
            if not won:
                transaction.set_rollback(True, using=using)
        claim = Claim(operation, scope, row.id, row.attempt + 1, new_hash, using)
        return _announced(claim, signals.claimed) if won else None
    if decision is Decision.PARK:
        with transaction.atomic(using=using, durable=True):
            won = backend.park_abandoned(using, scope, row)
        if won:
            signals.send(signals.parked, operation, scope, row.attempt)
        return None  # parked by this caller or another, or settled by its owner after all: look again
    if decision is Decision.WAIT:
        raise InProgressError(retry_after=retry_after(row, operation))
    if decision is Decision.REFUSE_REUSED:
        signals.send(signals.key_reused, operation, scope, row.attempt)
        raise KeyReusedError
    raise OutcomeUnknownError


def _announced(claim: Claim, signal: Signal) -> Claim:
    claim.shares_connection = connections[claim.using].in_atomic_block  # only a TestCase's gets here
    signals.send(signal, claim.operation, claim.scope, claim.attempt)
    return claim


def complete(claim: Claim, outcome: Outcome) -> None:
    """Record the outcome, if the attempt still owns the record. The last statement of the business transaction.

    Dies before the COMMIT: neither the business writes nor the outcome exist. Dies after it: both do. Slept before it
    while another attempt took over: no row matches, and the caller's transaction must roll back.

    :raises LeaseLostError: the record is not this attempt's any more.
    """
    if not sql.backend(claim.using).complete(claim.using, claim.fence, outcome):
        claim.lost = True
        raise _lost(claim)
    fault_point("complete.sent")


def record(claim: Claim, outcome: Outcome) -> None:
    """Record an outcome in a transaction of its own.

    :raises LeaseLostError: another attempt owns the record.
    :raises UnavailableError: it could not be recorded, or may have been.
    """
    try:
        with transaction.atomic(using=claim.using, durable=True):
            complete(claim, outcome)
    except (DatabaseError, InterfaceError) as error:
        raise UnavailableError(retry_after=1) from error


def release(claim: Claim) -> bool:
    """Give the claim up so that a retry runs at once. Only for a run that is known to have had no effect.

    False where another attempt owns the record by now: its claim is not this one's to free.
    """
    fault_point("release.before")
    with transaction.atomic(using=claim.using, durable=True):
        released = sql.backend(claim.using).release(claim.using, claim.fence)
        fault_point("release.sent")
    return released


def park(claim: Claim) -> bool:
    """Stop automatic handling: the attempt ended and nobody can say whether it took effect."""
    with transaction.atomic(using=claim.using, durable=True):
        return sql.backend(claim.using).park(claim.using, claim.fence)


def read_winner(claim: Claim, payload: Payload) -> Outcome:
    """What a claimant that lost its lease answers with: the winner's outcome.

    :raises InProgressError: there is none yet.
    :raises UnavailableError: the store can't be read.
    """
    try:
        row = sql.backend(claim.using).read(claim.using, claim.scope)
    except (DatabaseError, InterfaceError) as error:
        raise UnavailableError(retry_after=1) from error
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


def take_over_abandoned(operation: Operation, record: IdempotencyRecord, using: str) -> Claim | None:
    """Own a record that a sweep found abandoned. None where another one was faster, or its owner lives after all."""
    scope = record.scope
    row = Row(
        id=record.pk,
        attempt=record.attempt,
        status=Status(record.status),
        request_hash=record.request_hash,
        lease_left=0.0,
        retention_over=False,
        outcome=None,
    )
    with transaction.atomic(using=using, durable=True):
        won = sql.backend(using).take_over(using, scope, row, operation.lease)
    if not won:
        return None
    claim = Claim(operation, scope, row.id, row.attempt + 1, row.request_hash, using, abandoned=True)
    return _announced(claim, signals.taken_over)


def renew(claim: Claim) -> bool:
    """Prolong the lease. False where another attempt owns the record by now.

    The handler's own transaction would hide the new lease until its end, and lock the record against everybody
    until then. So the statement goes through another connection, except on SQLite: there an open transaction of ours
    means that nobody else can write, take-overs included.

    :raises UnavailableError: the store can't be reached.
    """
    connection = connections[claim.using]
    backend = sql.backend(claim.using)
    try:
        if not connection.in_atomic_block or claim.shares_connection:
            return _set_lease(claim)
        if connection.vendor == "sqlite":
            row = backend.read(claim.using, claim.scope)
            return row is not None and (row.id, row.attempt) == (claim.record_id, claim.attempt)
        with ThreadPoolExecutor(max_workers=1) as elsewhere:
            return elsewhere.submit(_set_lease_and_close, claim).result()
    except (DatabaseError, InterfaceError) as error:
        raise UnavailableError(retry_after=1) from error


def _set_lease(claim: Claim) -> bool:
    with transaction.atomic(using=claim.using):
        return sql.backend(claim.using).set_lease(claim.using, claim.fence, claim.operation.lease)


def _set_lease_and_close(claim: Claim) -> bool:
    try:
        return _set_lease(claim)
    finally:
        connections.close_all()


def postpone(claim: Claim, duration: timedelta) -> bool:
    """Leave the record to whoever comes after ``duration``: what became of it is not known yet."""
    with transaction.atomic(using=claim.using, durable=True):
        return sql.backend(claim.using).set_lease(claim.using, claim.fence, duration)


def _lost(claim: Claim) -> LeaseLostError:
    return LeaseLostError(
        f"Attempt {claim.attempt} of operation {claim.operation.name!r} outlived its lease of "
        f"{claim.operation.lease.total_seconds():g} s and was taken over. Its writes are rolled back."
    )


def _refuse_outer_transaction(using: str, operation: Operation) -> None:
    if not connections[using].in_atomic_block:
        return
    try:
        with transaction.atomic(using=using, durable=True):
            pass  # allowed inside the transaction that TestCase wraps a test in, and nowhere else
    except RuntimeError as error:
        raise OuterTransactionError(
            f"Operation {operation.name!r} was called inside an open transaction of database {using!r}, in which its "
            f"claim could not be committed for others to see. Call it outside of atomic(). Under ATOMIC_REQUESTS a "
            f"protected view is exempt by itself; if another decorator or an overridden as_view() hides it, mark the "
            f"outermost view with django.db.transaction.non_atomic_requests."
        ) from error
