"""Decides who may run an operation: read its record, insert a claim, or decide about the record that is there.

Each change of a record is one statement and a compare-and-set. Only this module and ``decisions`` assign a record to an
owner.
"""

from __future__ import annotations

from typing import Final

from django.db import DatabaseError, IntegrityError, InterfaceError

from .. import signals
from ..exceptions import InProgressError
from ..lifecycle import decide
from ..outcome import Outcome
from ..store import Fence, Row
from .claim_request import ClaimRequest
from .decisions import carry_out
from .faults import fault_point
from .ownership import Ownership, own, store_errors, unavailable

#: A claim starts again if the record changed meanwhile: it was purged after the insert found it, another attempt took
#: it over, or the database reported a serialization failure (REPEATABLE READ) or a deadlock (InnoDB). Each round needs
#: a change by another process, so this many suffice.
MAX_ROUNDS: Final = 8


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
            fault_point["claim.committed"]()
            claimed = Fence(request.scope, inserted, 1, request.payload.request_hash)
            return own(request.policy, claimed, request.store, signals.claimed)
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
    return carry_out(decision, request, row)


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
            inserted = store.insert_claim(
                request.scope,
                request.payload.request_hash,
                lease=policy.lease,
                retention=policy.retention,
                undone_by_crash=policy.undone_by_crash,
            )
            fault_point["claim.sent"]()
    except IntegrityError as error:
        if not store.is_duplicate(error):
            raise
        return None
    return inserted


def read_winner(request: ClaimRequest) -> Outcome:
    """The outcome of the attempt that won, for the client of an attempt that lost its lease.

    :raises InProgressError: the winner has no outcome yet.
    """
    with store_errors(request.store.using):
        row = request.store.read(request.scope)
    if row is not None and row.outcome is not None and request.payload.matches(row.fence.request_hash):
        return row.outcome
    raise InProgressError(retry_after=1)
