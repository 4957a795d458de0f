"""The states of a record and the one decision table over them. Pure: no I/O, nothing of Django.

absent       -> in_progress     claim: one winner, attempt 1
in_progress  -> completed       complete, if the attempt still owns the record
in_progress  -> recoverable     release, if the attempt still owns the record and had no effect
in_progress  -> in_progress     take over after the lease, attempt + 1, where running again is safe
in_progress  -> parked          the lease is over and nobody can say what happened
recoverable  -> in_progress     claim, attempt + 1
parked       -> completed       somebody found the outcome
parked       -> recoverable     somebody found that nothing had happened
any but a live claim -> in_progress   claim past retention: a new request, attempt + 1
"""

from __future__ import annotations

from enum import Enum


class Status(str, Enum):
    """What a record says of its operation. The values are what the database holds."""

    IN_PROGRESS = "in_progress"  # an attempt claimed it; alive for as long as its lease
    COMPLETED = "completed"  # the outcome is recorded; every retry is answered from it
    RECOVERABLE = "recoverable"  # known to have had no effect; the next retry runs
    PARKED = "parked"  # nobody knows whether it took effect; it waits for somebody to find out

    __str__ = str.__str__


class Recovery(Enum):
    """What an operation's author declares about a claim whose process disappeared."""

    REEXECUTE = "reexecute"  # run it again: effects share the record's transaction, or carry a derived key
    RECONCILE = "reconcile"  # ask the outside world what happened
    PARK = "park"  # never run it again by itself


class Decision(Enum):
    """What a request that did not win the first claim does next."""

    REPLAY = "replay"  # answer from the recorded outcome
    WAIT = "wait"  # another attempt is alive
    REFUSE_REUSED = "refuse_reused"  # the key belongs to another payload
    TAKE_OVER = "take_over"  # claim it again, same payload, attempt + 1
    START_OVER = "start_over"  # retention is over: claim it for this payload, as if absent
    RECONCILE = "reconcile"  # abandoned; find out before anything runs
    PARK = "park"  # abandoned; nobody may run it again
    REPORT_PARKED = "report_parked"  # its outcome is unknown already


_ABANDONED = {
    Recovery.REEXECUTE: Decision.TAKE_OVER,
    Recovery.RECONCILE: Decision.RECONCILE,
    Recovery.PARK: Decision.PARK,
}


def decide(
    status: Status, *, lease_over: bool, retention_over: bool, same_payload: bool, recovery: Recovery
) -> Decision:
    """Say what a duplicate gets.

    ``lease_over`` and ``retention_over`` are the database clock's verdicts; ``lease_over`` only matters while a record
    is in progress. The order of the tests below is the contract:

    1. A live claim is left alone whatever the payload and however old the record, because its run may still commit.
    2. Past retention the record says nothing any more: the same key is a new request.
    3. Another payload never learns anything and never runs, not even when the claim was abandoned.
    """
    if status is Status.IN_PROGRESS and not lease_over:
        return Decision.WAIT
    if retention_over:
        return Decision.START_OVER
    if not same_payload:
        return Decision.REFUSE_REUSED
    if status is Status.COMPLETED:
        return Decision.REPLAY
    if status is Status.PARKED:
        return Decision.REPORT_PARKED
    if status is Status.RECOVERABLE:
        return Decision.TAKE_OVER
    return _ABANDONED[recovery]
