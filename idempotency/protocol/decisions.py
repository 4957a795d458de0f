"""Carries out the decision about an existing record: replay, refuse, wait for its owner, take it over, or park it."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Final

from django.db import DatabaseError
from django.dispatch import Signal

from .. import signals
from ..conf import settings
from ..exceptions import InProgressError, KeyReusedError, OutcomeUnknownError, UnavailableError
from ..identity import fingerprint
from ..lifecycle import Decision, Status
from ..operation import Operation, Policy
from ..outcome import Outcome
from ..store import Fence, Row, Store, newer_record
from . import steps
from .claim_request import ClaimRequest
from .faults import fault_point
from .ownership import Ownership, own

logger: Final = logging.getLogger("idempotency")

#: How old a claim must be, in seconds, before a duplicate checks its session. So a double click doesn't pay for the
#: check.
LOOK_AFTER = 1


def carry_out(decision: Decision, request: ClaimRequest, row: Row) -> Ownership | Outcome | None:
    """Act on a decision about ``row``. Results and errors are as for ``acquire``; None means that the record changed
    meanwhile, so read it again.
    """
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
        won = store.start_over(
            row.fence,
            request_hash,
            lease=policy.lease,
            retention=policy.retention,
            undone_by_crash=policy.undone_by_crash,
        )
        if won:
            steps.forget(row.fence, store.using)  # the earlier request's steps
    next_attempt = replace(row.fence, attempt=row.fence.attempt + 1, request_hash=request_hash)
    return own(policy, next_attempt, store, signals.claimed) if won else None


def take_over(policy: Policy, observed: Fence, store: Store, signal: Signal) -> Ownership | None:
    """Own a released or abandoned record. None if another process was faster, or the lease was renewed.

    The update names the observed attempt. So if many callers saw the same abandoned claim, one wins, and if this
    process slept meanwhile, the update matches no row. It also checks the lease again. Its COMMIT waits for the disk,
    because after a crash that lost a take-over, the same attempt number could be assigned twice.
    """
    with store.own_statement(policy.operation):
        won = store.take_over(
            observed, lease=policy.lease, retention=policy.retention, undone_by_crash=policy.undone_by_crash
        )
        fault_point["takeover.sent"]()
    return own(policy, replace(observed, attempt=observed.attempt + 1), store, signal) if won else None


def take_over_abandoned(policy: Policy, observed: Fence, store: Store) -> Ownership | None:
    """Own an abandoned record whose reconciler must be called before anything runs. None as for ``take_over``."""
    owned = take_over(policy, observed, store, signals.taken_over)
    if owned is not None:
        owned.abandoned = True
    return owned


def retry_after(lease_left: float, policy: Policy) -> int:
    """When to retry, in whole seconds: after as long as the attempt has been running, bounded by the lease and
    ``MAX_RETRY_AFTER``. So duplicates of a long request arrive less often than duplicates of a short one."""
    running_for = policy.lease.total_seconds() - lease_left
    bound = min(lease_left, settings().max_retry_after.total_seconds())
    return max(1, math.ceil(min(running_for, bound)))
