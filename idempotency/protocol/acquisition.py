"""Decides who may run an operation: claim its record, take it over, wait, or return the outcome.

Each change of a record is one statement and a compare-and-set. Only this module assigns a record to an owner.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace
from typing import Any, Final

from django.db import DatabaseError, IntegrityError, InterfaceError, router
from django.dispatch import Signal
from django.utils.functional import cached_property

from .. import signals
from ..conf import CLOCK_SKEW, settings
from ..exceptions import (
    InProgressError,
    KeyExpiredError,
    KeyInvalidError,
    KeyReusedError,
    OutcomeUnknownError,
    RequestError,
    UnavailableError,
)
from ..identity import fingerprint
from ..identity.fingerprint import Payload
from ..identity.keys import is_derived, time_of
from ..identity.scope import Scope
from ..lifecycle import Decision, Recovery, Status, decide
from ..models import IdempotencyRecord
from ..operation import Operation, Policy
from ..options.values import Wait
from ..outcome import Outcome
from ..store import Fence, Row, Store, newer_record, store_for
from . import steps
from .faults import fault_point
from .ownership import Ownership, store_errors, unavailable
from .recovery import reconcile

logger: Final = logging.getLogger("idempotency")

#: A claim starts again if the record changed meanwhile: it was purged after the insert found it, another attempt took
#: it over, or the database reported a serialization failure (REPEATABLE READ) or a deadlock (InnoDB). Each round needs
#: a change by another process, so this many suffice.
MAX_ROUNDS = 8

#: The pauses, in seconds, between the reads of a waiting duplicate. They are short at first and then grow.
FIRST_POLL = 0.02
SLOWEST_POLL = 0.25

#: How old a claim must be, in seconds, before a duplicate checks its session. So a double click doesn't pay for the
#: check.
LOOK_AFTER = 1


@dataclass(frozen=True)
class ClaimRequest:
    """The operation, scope and payload to claim."""

    policy: Policy
    scope: Scope
    payload: Payload
    #: Raised instead of starting a new operation; None if it may start.
    refusal: RequestError | None = None

    @cached_property
    def store(self) -> Store:
        """This thread's store for the record's database."""
        return store_for(
            router.db_for_write(IdempotencyRecord, operation=self.scope.operation, account_id=self.scope.account_id)
        )


def refusal_to_begin(policy: Policy, key: str) -> RequestError | None:
    """The error for a request that would start a new operation under this key, or None if it may.

    After a record's retention, a late retry would run again. ``max_key_age`` refuses such a retry, and so it must
    refuse a key without a timestamp. Only a new operation is refused: a recorded outcome is replayed, and a released or
    abandoned claim is the same operation.

    Why nothing runs twice: a record is kept for ``retention`` from its first request, and the key is made before that
    request. So a retry whose record is gone has a key older than ``retention``, if all clocks agree. They may differ by
    ``CLOCK_SKEW``, so ``max_key_age`` plus ``CLOCK_SKEW`` is at most ``retention``, and a key from further in the
    future is refused, too. The clock is this server's, because the database's clock would cost a round trip.

    A derived key has no timestamp. It is accepted, because its sender is another operation, which sends this key in
    every attempt. Nothing runs twice if ``retention`` is longer than all attempts of the sender together.
    """
    if policy.max_key_age is None:
        return None
    made = time_of(key)
    if made is None:
        if is_derived(key):
            return None
        return KeyInvalidError(
            "This operation needs an Idempotency-Key that contains a timestamp: a version 7 UUID or a ULID."
        )
    age = time.time() - made
    if age < -CLOCK_SKEW.total_seconds():
        return KeyInvalidError("The timestamp in the Idempotency-Key is in the future. Check the client's clock.")
    if age > policy.max_key_age.total_seconds():
        return KeyExpiredError()
    return None


def acquire_or_wait(request: ClaimRequest) -> Ownership | Outcome:
    """Call ``acquire``, and wait or recover as the operation declares."""
    answer = request.policy.in_progress
    deadline = time.monotonic() + (answer.seconds if isinstance(answer, Wait) else 0)
    pause, has_waited = FIRST_POLL, False
    while True:
        try:
            settled = acquire(request, expect_record=has_waited)
            if isinstance(settled, Ownership) and settled.abandoned:
                outcome = reconcile(settled)
                return settled if outcome is None else outcome
            return settled
        except InProgressError:
            left = deadline - time.monotonic()
            if left <= 0:
                signals.send(signals.conflicted, request.policy.operation, request.scope, 0)
                raise
            # No transaction and no lock is held meanwhile, and each poll is one read.
            time.sleep(min(pause, left))  # no notification works on every database
            pause, has_waited = min(pause * 2, SLOWEST_POLL), True


def acquire(request: ClaimRequest, *, expect_record: bool) -> Ownership | Outcome:
    """Own the scope, or return its outcome.

    :param expect_record: read the record before trying to claim, because there probably is one.
    :returns: an ``Ownership`` if the caller must run the operation, after the reconciler if it is ``abandoned``; the
        ``Outcome`` if the operation has run already.
    :raises IdempotencyError: nothing ran. The class gives the reason.
    """
    for _ in range(MAX_ROUNDS):
        try:
            settled = _one_round(request, expect_record)
        except (DatabaseError, InterfaceError) as error:
            if request.store.lost_a_race(error):
                continue
            if request.store.timed_out_waiting(error):
                # Another transaction holds the row lock. It is committing, or its process froze before COMMIT. In both
                # cases this caller can't get the claim now.
                raise InProgressError(retry_after=1) from error
            raise unavailable(request.store.using, error) from error
        if settled is not None:
            return settled
    raise InProgressError(retry_after=1)


def _one_round(request: ClaimRequest, expect_record: bool) -> Ownership | Outcome | None:
    """Read or insert, and carry out the decision about an existing record. None if it changed meanwhile: try again."""
    # If the database has a single writer, an insert waits for it, and the writer may be the attempt that this request
    # duplicates. A read does not wait.
    look_first = expect_record or request.store.has_one_writer or request.refusal is not None
    row = request.store.read(request.scope) if look_first else None
    if row is None:
        if request.refusal is not None:
            raise request.refusal
        inserted = _insert(request)
        if isinstance(inserted, int):
            claimed = Fence(request.scope, inserted, 1, request.payload.request_hash)
            return _owned(request.policy, claimed, request.store, signals.claimed)
        row = inserted or request.store.read(request.scope)
    if row is None:
        return None  # the record was purged after the insert had found it
    decision = decide(
        row.status,
        lease_over=row.lease_left <= 0,
        retention_over=row.retention_over,
        same_payload=request.payload.matches(row.fence.request_hash),
        recovery=request.policy.recovery,
    )
    return _follow(decision, request, row)


def _insert(request: ClaimRequest) -> int | Row | None:
    """Claim a scope that has no record, and return the new record's id. If there is one already, return it if the store
    has read it.

    The claim is committed before anything runs, so that every other process sees it. The unique constraint lets one
    insert win. If the process dies before the COMMIT, nothing is claimed. If it dies after the COMMIT, the lease runs
    out and the claim is recovered. If it sleeps for an hour after the COMMIT, another attempt takes over, and every
    later change by this one is fenced.

    The COMMIT need not wait for the disk if losing the claim is harmless. It is harmless if a crash undoes the attempt,
    because the COMMIT of the effects comes later in the same log: no effect can be durable without the claim.
    """
    policy, store = request.policy, request.store
    fault_point["claim.before"]()
    try:
        with store.own_statement(policy.operation):
            inserted = store.insert_claim(request.scope, request.payload.request_hash, **_terms(policy))
            fault_point["claim.sent"]()
    except IntegrityError as error:
        if not store.is_duplicate(error):
            raise
        return None
    if isinstance(inserted, int):
        fault_point["claim.committed"]()
    return inserted


def _terms(policy: Policy) -> dict[str, Any]:
    """The arguments of a claim that depend on the policy."""
    undone_by_crash = policy.transaction and policy.recovery is Recovery.REEXECUTE
    return {"lease": policy.lease, "retention": policy.retention, "undone_by_crash": undone_by_crash}


def _owned(policy: Policy, fence: Fence, store: Store, signal: Signal) -> Ownership:
    """Return the ownership of a claim that was just committed, and send its signal."""
    # Here a transaction is open only in a TestCase.
    owned = Ownership(policy, fence, store, store.connection.in_atomic_block)
    if _terms(policy)["undone_by_crash"]:
        owned.session = store.session
    signals.send(signal, policy.operation, fence.scope, fence.attempt, request_hash=fence.request_hash)
    return owned


def _follow(decision: Decision, request: ClaimRequest, row: Row) -> Ownership | Outcome | None:
    policy, store, attempt = request.policy, request.store, row.fence.attempt
    match decision:
        case Decision.REPLAY:
            fault_point["replay.read"]()
            signals.send(signals.replayed, policy.operation, request.scope, attempt)
            return row.outcome
        case Decision.WAIT:
            _leave_to_owner(policy, row, store)
            return None
        case Decision.REFUSE_REUSED:
            version = row.fence.request_hash.partition(":")[0]
            if not fingerprint.is_known(row.fence.request_hash):
                # It is unknown whether the payload is the same. "Use a new key" would make the client pay twice.
                raise newer_record(f"a fingerprint of version {version!r}")
            if not fingerprint.has_known_secret(row.fence.request_hash):
                raise _unknown_secret(policy.operation)
            signals.send(signals.key_reused, policy.operation, request.scope, attempt)
            raise KeyReusedError
        case Decision.TAKE_OVER:
            was_released = row.status is Status.RECOVERABLE
            return take_over(policy, row.fence, store, signals.claimed if was_released else signals.taken_over)
        case Decision.RECONCILE:
            return take_over_abandoned(policy, row.fence, store)
        case Decision.START_OVER:
            return _start_over(request, row)
        case Decision.PARK:
            with store.own_statement(policy.operation):
                won = store.park_abandoned(row.fence)
            if won:
                signals.send(signals.parked, policy.operation, request.scope, attempt)
            # It is now parked, by this caller or another one, or its owner has settled it. The next round reads it.
            return None
    raise OutcomeUnknownError  # Decision.REPORT_PARKED


def _leave_to_owner(policy: Policy, row: Row, store: Store) -> None:
    """Raise ``InProgressError``, unless the owner's session is gone. Then the next round finds an abandoned claim."""
    if row.session is not None and policy.lease.total_seconds() - row.lease_left >= LOOK_AFTER:
        try:
            with store.own_statement(policy.operation):
                ended = store.end_lease_of_gone_session(row.fence)
        except DatabaseError as error:
            if not store.is_permanent(error):
                raise
            ended = False  # this role may not list sessions, so the lease decides
        if ended:
            return
    raise InProgressError(retry_after=retry_after(row.lease_left, policy))


def _unknown_secret(operation: Operation) -> UnavailableError:
    """The error for a payload that can't be compared. As with an unknown version, a retry may reach a process that
    can."""
    logger.error(
        "Operation %r: a record's fingerprint was made with a secret that is not in the settings. Nothing was run, and "
        "the client gets a 503 with Retry-After. Put the secret into SECRET_KEY_FALLBACKS or FINGERPRINT_KEYS.",
        operation.name,
    )
    return UnavailableError(
        "The request can't be compared with the one that first used this Idempotency-Key. Retry with the same "
        "Idempotency-Key.",
        retry_after=1,
    )


def _start_over(request: ClaimRequest, row: Row) -> Ownership | None:
    if request.refusal is not None:
        raise request.refusal
    policy, store, request_hash = request.policy, request.store, request.payload.request_hash
    with store.own_transaction(policy.operation):
        won = store.start_over(row.fence, request_hash, **_terms(policy))
        if won:
            steps.forget(row.fence, store.using)  # the earlier request's steps
    next_attempt = replace(row.fence, attempt=row.fence.attempt + 1, request_hash=request_hash)
    return _owned(policy, next_attempt, store, signals.claimed) if won else None


def take_over(policy: Policy, observed: Fence, store: Store, signal: Signal) -> Ownership | None:
    """Own a released or abandoned record. None if another process was faster, or the lease was renewed.

    The update names the observed attempt. So if many callers saw the same abandoned claim, one wins, and if this
    process slept meanwhile, the update matches no row. It also checks the lease again. Its COMMIT waits for the disk,
    because after a crash that lost a take-over, the same attempt number could be assigned twice.
    """
    with store.own_statement(policy.operation):
        won = store.take_over(observed, **_terms(policy))
        fault_point["takeover.sent"]()
    return _owned(policy, replace(observed, attempt=observed.attempt + 1), store, signal) if won else None


def take_over_abandoned(policy: Policy, observed: Fence, store: Store) -> Ownership | None:
    """Own an abandoned record whose reconciler must be called before anything runs. None as for ``take_over``."""
    owned = take_over(policy, observed, store, signals.taken_over)
    if owned is not None:
        owned.abandoned = True
    return owned


def read_winner(request: ClaimRequest) -> Outcome:
    """The outcome of the attempt that won, for the client of an attempt that lost its lease.

    :raises InProgressError: the winner has no outcome yet.
    """
    with store_errors(request.store.using):
        row = request.store.read(request.scope)
    if row is not None and row.outcome is not None and request.payload.matches(row.fence.request_hash):
        return row.outcome
    raise InProgressError(retry_after=1)


def retry_after(lease_left: float, policy: Policy) -> int:
    """When to retry, in whole seconds: after as long as the attempt has been running, bounded by the lease and
    ``MAX_RETRY_AFTER``. So duplicates of a long request arrive less often than duplicates of a short one."""
    running_for = policy.lease.total_seconds() - lease_left
    bound = min(lease_left, settings().max_retry_after.total_seconds())
    return max(1, math.ceil(min(running_for, bound)))
