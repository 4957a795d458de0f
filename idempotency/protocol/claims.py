"""Claim, take over, complete, release and park. Each is one statement and a compare-and-set.

Only this module decides who owns a record. Every change of an owned record is fenced: it names the whole scope, the
row, the attempt and the payload's fingerprint, and matches no row once another attempt owns the record.

The row's id and the attempt would be enough if a database never lost a commit. But a first claim may commit without
waiting for the disk (see ``_insert``). A database that crashes can then lose the claim *and* assign its id again, to
another key, at attempt 1. Because the fence has the scope and the fingerprint, a claimant that survived such a crash
can match only a claim of the same operation with the same payload. Either of the two may complete it, and only one can.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta

from django.db import DatabaseError, IntegrityError, InterfaceError, connections, transaction
from django.dispatch import Signal
from django.utils.functional import cached_property

from .. import signals, sql
from ..conf import settings
from ..exceptions import InProgressError, KeyReusedError, LeaseLostError, OutcomeUnknownError, RequestError
from ..identity import fingerprint
from ..identity.fingerprint import Payload
from ..identity.scope import Scope
from ..lifecycle import Decision, Recovery, Status, decide
from ..models import IdempotencyRecord
from ..operation import Operation
from ..outcome import Outcome
from ..sql import Row, Store, newer_record
from . import steps
from .changes import fenced_change
from .faults import fault_point
from .ownership import Ownership, on_behalf_of
from .transactions import alias_of, own_transaction, store_errors, unavailable

#: A claim starts again if the record changed meanwhile: it was purged after the insert found it, another attempt took
#: it over, or the database refused with a serialization failure (REPEATABLE READ) or a deadlock (InnoDB). Each round
#: needs a change by another process, so after a few rounds another one would not help.
MAX_ROUNDS = 8


@dataclass(frozen=True)
class ClaimRequest:
    """What a caller wants to claim, and in which database."""

    operation: Operation
    scope: Scope
    payload: Payload
    using: str
    #: Raised in place of beginning a new operation; None if it may begin.
    refusal: RequestError | None = None

    @cached_property
    def store(self) -> Store:
        return sql.store(self.using)

    def own_transaction(self, *, one_statement: bool = True) -> AbstractContextManager[None]:
        return own_transaction(self.using, f"Operation {self.operation.name!r}", one_statement=one_statement)

    def owned(self, record_id: int, attempt: int, request_hash: str) -> Ownership:
        return Ownership(self.operation, self.scope, record_id, attempt, request_hash, self.using)


def acquire(
    operation: Operation,
    scope: Scope,
    payload: Payload,
    *,
    expect_record: bool = False,
    refusal: RequestError | None = None,
) -> Ownership | Outcome:
    """Own the scope, or learn its outcome.

    :param refusal: raised if the scope has no record, or one whose retention is over. Otherwise it has no effect.
    :param expect_record: whether the scope is likely to have a record, so that it is read before a claim is tried.
    :returns: an ``Ownership`` if this caller must run the operation; if it is ``abandoned``, the caller must first ask
        the reconciler what became of the earlier attempt. The ``Outcome`` if the operation has run already.
    :raises InProgressError: another attempt is presumed alive.
    :raises KeyReusedError: the key belongs to another payload.
    :raises OutcomeUnknownError: an attempt was cut off, and nobody knows how it ended.
    :raises UnavailableError: the database can't be reached or written. Nothing ran.
    :raises OuterTransactionError: the caller has an open transaction, in which a claim could not be committed.
    :raises PayloadInvalidError: the payload has no canonical form.
    """
    request = ClaimRequest(operation, scope, payload, alias_of(scope), refusal)
    for _ in range(MAX_ROUNDS):
        try:
            settled = _one_round(request, expect_record)
        except (DatabaseError, InterfaceError) as error:
            if request.store.lost_a_race(error):
                continue
            if request.store.timed_out_waiting(error):
                # Another transaction has locked the row. Its owner is committing, or froze before its COMMIT. In both
                # cases this caller can't have the claim now.
                raise InProgressError(retry_after=1) from error
            raise unavailable(request.using, error) from error
        if settled is not None:
            return settled
    raise InProgressError(retry_after=1)


def _one_round(request: ClaimRequest, expect_record: bool) -> Ownership | Outcome | None:
    """Read or insert. If there is a record, do what ``decide`` says about it.

    :returns: None if the record changed meanwhile, so that another round is needed.
    """
    # If the database has one writer, an insert waits for it, and the writer may be the very attempt that a duplicate
    # must learn of. A read does not wait.
    look_first = expect_record or request.store.has_one_writer or request.refusal is not None
    row = request.store.read(request.scope) if look_first else None
    if row is None:
        if request.refusal is not None:
            raise request.refusal
        if (owned := _insert(request)) is not None:
            return owned
        row = request.store.read(request.scope)
    if row is None:
        return None  # the record was purged after the insert had found it
    return _ANSWERS[_decide(request, row)](request, row)


def _decide(request: ClaimRequest, row: Row) -> Decision:
    return decide(
        row.status,
        lease_over=row.lease_over,
        retention_over=row.retention_over,
        same_payload=request.payload.matches(row.request_hash),
        recovery=request.operation.recovery,
    )


def recorded_outcome(operation: Operation, scope: Scope, payload: Payload) -> Outcome | None:
    """The outcome that a retry with this payload would get, or None if it would get anything else. Nothing is claimed.

    :raises UnavailableError: the record can't be read.
    :raises PayloadInvalidError: the payload has no canonical form.
    """
    request = ClaimRequest(operation, scope, payload, alias_of(scope))
    with store_errors(request.using):
        row = request.store.read(scope)
    if row is None or _decide(request, row) is not Decision.REPLAY:
        return None
    return _replay(request, row)


def _insert(request: ClaimRequest) -> Ownership | None:
    """Claim a scope that has no record.

    The claim is committed before anything runs, so that every other process sees it. The unique constraint lets one
    insert win. If the process dies before the COMMIT, nothing was claimed. If it dies after the COMMIT, the lease runs
    out and the claim is recovered. If it sleeps for an hour after the COMMIT, another attempt takes over, and
    everything that this one does later is fenced.

    The COMMIT need not wait for the disk if it is harmless to lose the claim. With transaction=True and REEXECUTE it
    is, because the effects' own COMMIT comes later in the same log: no effect can be durable without the claim.
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


# The following functions carry out the decisions. They return None if the record has changed meanwhile, so that another
# round is needed.


def _replay(request: ClaimRequest, row: Row) -> Outcome | None:
    fault_point("replay.read")
    signals.send(signals.replayed, request.operation, request.scope, row.attempt)
    return row.outcome


def _take_over(request: ClaimRequest, row: Row) -> Ownership | None:
    # The update names the attempt that was read. So if many callers saw the same abandoned claim, one wins, and if this
    # process slept since the read, it matches no row. The update also checks the lease again, so a claim that was
    # renewed since the read is left alone. Its COMMIT waits for the disk, because if a crash loses a take-over, the
    # same attempt number could be given out twice.
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
    if request.refusal is not None:
        raise request.refusal
    operation, request_hash = request.operation, request.payload.request_hash
    with request.own_transaction(one_statement=False):
        # Delete the steps of the earlier request. If another attempt wins the claim, the deletion is rolled back.
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
    # Now the record is parked, by this caller or another one, or its owner has settled it. The next round reads which.


def _refuse_in_progress(request: ClaimRequest, row: Row) -> None:
    raise InProgressError(retry_after=retry_after(row, request.operation))


def _refuse_reused(request: ClaimRequest, row: Row) -> None:
    if not fingerprint.is_known(row.request_hash):
        # Nobody can tell whether the payload is the same. "Use a new key" would make the client pay twice.
        raise newer_record(f"a fingerprint of version {row.request_hash.partition(':')[0]!r}")
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
    owned.shares_connection = connections[owned.using].in_atomic_block  # only a TestCase has one open here
    signals.send(signal, owned.operation, owned.scope, owned.attempt)
    return owned


def complete(owned: Ownership, outcome: Outcome) -> None:
    """Record the outcome if the attempt still owns the record. This is the last statement of the business transaction.

    If the process dies before the COMMIT, neither the business writes nor the outcome exist. If it dies after the
    COMMIT, both exist. If it slept before this statement until another attempt took over, no row matches, and the
    caller's transaction must roll back.

    :raises LeaseLostError: another attempt owns the record.
    """
    operation = owned.operation
    if not sql.store(owned.using).complete(owned.fence, outcome, ttl=operation.ttl, body_ttl=operation.body_ttl):
        owned.lost = True
        raise owned.lost_error()
    fault_point("complete.sent")


def record(owned: Ownership, outcome: Outcome) -> None:
    """Record an outcome in a transaction of its own.

    :raises LeaseLostError: another attempt owns the record.
    :raises UnavailableError: the outcome could not be recorded, or it is not known whether it was.
    """
    with on_behalf_of(owned), store_errors(owned.using):
        try:
            fenced_change(owned, lambda: complete(owned, outcome))
        except LeaseLostError:
            # The COMMIT of an earlier try may have succeeded although its answer was lost. Then the record has this
            # attempt's outcome, and all is well.
            row = sql.store(owned.using).read(owned.scope)
            if row is None or (row.attempt, row.outcome) != (owned.attempt, outcome):
                raise


def release(owned: Ownership, error: str | None = None) -> bool:
    """Give the claim up so that a retry runs at once. Only for a run that is known to have had no effect.

    :param error: why the run failed, for people. None keeps what is known of an earlier one.
    :returns: False if another attempt owns the record. Then nothing is released.
    """
    fault_point("release.before")

    def change() -> bool:
        released = sql.store(owned.using).release(owned.fence, error)
        fault_point("release.sent")
        return released

    return fenced_change(owned, change)


def park(owned: Ownership, error: str | None = None) -> bool:
    """Stop automatic handling, because the attempt ended and nobody knows whether it took effect.

    :param error: as for ``release``.
    :returns: False if another attempt owns the record.
    """
    return fenced_change(owned, lambda: sql.store(owned.using).park(owned.fence, error))


def postpone(owned: Ownership, duration: timedelta) -> bool:
    """Let the lease end after ``duration``, so that the next retry or sweep after that asks the reconciler again.

    :returns: False if another attempt owns the record.
    """
    return fenced_change(
        owned, lambda: sql.store(owned.using).set_lease(owned.fence, duration, ttl=owned.operation.ttl)
    )


def read_winner(owned: Ownership, payload: Payload) -> Outcome:
    """The outcome of the attempt that won. The caller of an attempt that lost its lease gets it.

    :raises InProgressError: the winner has no outcome yet.
    :raises UnavailableError: the record can't be read.
    """
    with store_errors(owned.using):
        row = sql.store(owned.using).read(owned.scope)
    if row is not None and row.outcome is not None and payload.matches(row.request_hash):
        return row.outcome
    raise InProgressError(retry_after=1)


def retry_after(row: Row, operation: Operation) -> int:
    """When to retry, in whole seconds: after as long as the attempt has been running, bounded by the lease and
    ``MAX_RETRY_AFTER``.

    So the duplicate of a short request comes back after a second, and the duplicates of a long request come less often.
    """
    running_for = operation.lease.total_seconds() - row.lease_left
    bound = min(row.lease_left, settings.max_retry_after.total_seconds())
    return max(1, math.ceil(min(running_for, bound)))


def take_over_abandoned(operation: Operation, record: IdempotencyRecord, using: str) -> Ownership | None:
    """Own a record that a sweep found abandoned.

    :returns: None if another process was faster, or if the owner is alive and has renewed its lease.
    """
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
