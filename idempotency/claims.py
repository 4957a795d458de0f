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
from dataclasses import dataclass, field

from django.db import DatabaseError, IntegrityError, InterfaceError, OperationalError, connections, router, transaction

from . import sql
from .conf import settings
from .exceptions import (
    AccountRequiredError,
    InProgressError,
    KeyReusedError,
    LeaseLostError,
    OutcomeUnknownError,
    OuterTransactionError,
    UnavailableError,
)
from .fingerprint import Payload
from .lifecycle import Decision, Recovery, decide
from .models import IdempotencyRecord
from .operation import Operation
from .outcome import Outcome
from .sql import Row, Scope

#: A claim starts again when the record changed under it: purged after the insert met it, taken over by another, or
#: (REPEATABLE READ, InnoDB) refused as a serialization failure or a deadlock. Each round needs another process to have
#: moved in between, so more than a few in a row means trouble that waiting doesn't cure.
MAX_ROUNDS = 8

MAX_ACCOUNT_LENGTH = 255


@dataclass
class Claim:
    """One attempt's ownership of a record.

    ``reference`` may be set by the handler of an operation that declares ``rebuild``: it is recorded in place of the
    response's body.
    """

    operation: Operation
    scope: Scope
    record_id: int
    attempt: int
    request_hash: str
    using: str = field(repr=False)
    reference: str | None = None


def alias() -> str:
    """The database that records are written to and read from. A replica may lag behind, so it is never asked."""
    return router.db_for_write(IdempotencyRecord)


def scope_of(operation: Operation, account_id: str | None, key: str) -> Scope:
    """The identity of one logical operation, from parts that came from outside.

    :raises AccountRequiredError: there is no account, or its identifier can't be stored and compared as it is.
    :raises TypeError: the account resolver returned something else than a str or None.
    """
    if account_id is None:
        raise AccountRequiredError
    if not isinstance(account_id, str):
        raise TypeError(
            f"The account of operation {operation.name!r} must be a str or None, not {type(account_id).__name__}."
        )
    if not 0 < len(account_id) <= MAX_ACCOUNT_LENGTH or not account_id.isprintable():
        raise AccountRequiredError("The authenticated account has no usable identifier.")
    return Scope(account_id, operation.name, key)


def acquire(operation: Operation, scope: Scope, payload: Payload) -> Claim | Outcome:
    """Own the scope, or learn what has become of it.

    :returns: a ``Claim`` when this caller is to run the operation, the ``Outcome`` when it has run already.
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
    except IntegrityError:
        record_id = None  # the portable insert's way of losing
    if record_id is not None:
        return Claim(operation, scope, record_id, 1, payload.request_hash, using)

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
        return row.outcome
    if decision is Decision.TAKE_OVER:
        # Fenced on the attempt just read, so of many who saw the same abandoned claim one wins; and the lease is judged
        # again, so a claim renewed since the read is left alone. Who slept since the read finds its attempt gone.
        # Waits for the disk: unlike a first claim, a take-over that a crash forgets could be handed out twice.
        with transaction.atomic(using=using, durable=True):
            won = backend.take_over(using, scope, row, operation.lease)
        return Claim(operation, scope, row.id, row.attempt + 1, row.request_hash, using) if won else None
    if decision is Decision.START_OVER:
        new_hash = payload.request_hash
        with transaction.atomic(using=using, durable=True):
            won = backend.start_over(using, scope, row, new_hash, lease=operation.lease, ttl=operation.ttl)
        return Claim(operation, scope, row.id, row.attempt + 1, new_hash, using) if won else None
    if decision is Decision.PARK:
        with transaction.atomic(using=using, durable=True):
            backend.park_abandoned(using, scope, row)
        return None  # parked by this caller or another, or settled by its owner after all: look again
    if decision is Decision.WAIT:
        raise InProgressError(retry_after=retry_after(row, operation))
    if decision is Decision.REFUSE_REUSE:
        raise KeyReusedError
    raise OutcomeUnknownError


def complete(claim: Claim, outcome: Outcome) -> None:
    """Record the outcome, if the attempt still owns the record. The last statement of the business transaction.

    Dies before the COMMIT: neither the business writes nor the outcome exist. Dies after it: both do. Slept before it
    while another attempt took over: no row matches, and the caller's transaction must roll back.

    :raises LeaseLostError: the record is not this attempt's any more.
    """
    if not sql.backend(claim.using).complete(claim.using, _fence(claim), outcome):
        raise LeaseLostError(
            f"Attempt {claim.attempt} of operation {claim.operation.name!r} outlived its lease of "
            f"{claim.operation.lease.total_seconds():g} s and was taken over. Its writes are rolled back."
        )


def release(claim: Claim) -> bool:
    """Give the claim up so that a retry runs at once. Only for a run that is known to have had no effect.

    False where another attempt owns the record by now: its claim is not this one's to free.
    """
    with transaction.atomic(using=claim.using, durable=True):
        return sql.backend(claim.using).release(claim.using, _fence(claim))


def park(claim: Claim) -> bool:
    """Stop automatic handling: the attempt ended and nobody can say whether it took effect."""
    with transaction.atomic(using=claim.using, durable=True):
        return sql.backend(claim.using).park(claim.using, _fence(claim))


def peek(claim: Claim, payload: Payload) -> Outcome:
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


def _fence(claim: Claim) -> sql.Fence:
    return sql.Fence(claim.scope, claim.record_id, claim.attempt, claim.request_hash)


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
