"""The states of a record, and the decision about a duplicate. No I/O and no Django.

absent       -> in_progress     claim: one winner, attempt 1
in_progress  -> completed       complete, if the attempt still owns the record
in_progress  -> recoverable     release, if the attempt still owns the record and had no effect
in_progress  -> in_progress     take over after the lease, attempt + 1, if it is safe to run again
in_progress  -> parked          the lease is over, and whether the operation took effect is unknown
recoverable  -> in_progress     claim, attempt + 1
parked       -> completed       an operator or a reconciler found the outcome
parked       -> recoverable     an operator or a reconciler found that the operation did not take effect
any that is known -> in_progress   claim past retention: a new request, attempt + 1

Known are completed and recoverable records, and abandoned claims of operations that are safe to run again. Retention
ends only these. A record whose outcome is unknown (parked, or an abandoned claim that must be reconciled or parked)
waits for that, however old it is.
"""

from __future__ import annotations

from enum import Enum, StrEnum


class Status(StrEnum):
    """The state of a record. The values are stored in the database."""

    IN_PROGRESS = "in_progress"  # an attempt claimed it, and is presumed alive until its lease ends
    COMPLETED = "completed"  # the outcome is recorded, and every retry gets it
    RECOVERABLE = "recoverable"  # the operation is known to have had no effect, and the next retry runs it
    PARKED = "parked"  # whether the operation took effect is unknown, and the record waits for a decision

    __str__ = str.__str__


class Recovery(Enum):
    """How to recover a claim whose process disappeared, as its operation declares."""

    REEXECUTE = "reexecute"  # run it again, because its effects share the record's transaction or carry a derived key
    RECONCILE = "reconcile"  # find out from an external system what happened
    PARK = "park"  # never run it again automatically


class Decision(Enum):
    """The action of a request that finds a record."""

    REPLAY = "replay"  # answer from the recorded outcome
    WAIT = "wait"  # another attempt is presumed alive
    REFUSE_REUSED = "refuse_reused"  # the key belongs to another payload
    TAKE_OVER = "take_over"  # claim the record again for the same payload, attempt + 1
    START_OVER = "start_over"  # the retention is over: claim the record for this payload, as if it were absent
    RECONCILE = "reconcile"  # the claim is abandoned: find out what happened before anything runs
    PARK = "park"  # the claim is abandoned: park the record, and run nothing
    REPORT_PARKED = "report_parked"  # the record is parked already


_ABANDONED = {
    Recovery.REEXECUTE: Decision.TAKE_OVER,
    Recovery.RECONCILE: Decision.RECONCILE,
    Recovery.PARK: Decision.PARK,
}


def decide(
    status: Status, *, lease_over: bool, retention_over: bool, same_payload: bool, recovery: Recovery
) -> Decision:
    """Decide about a duplicate.

    The order of the conditions below is the contract:

    1. A live claim is left alone, regardless of the payload and the record's age, because its run may still commit.
    2. After the record's retention the same key makes a new request, unless the outcome is unknown, because running the
       operation could then repeat an effect.
    3. A request with another payload gets no outcome and never runs, even if the claim is abandoned.

    :param lease_over: by the database's clock. Relevant only in the state in_progress.
    :param retention_over: by the database's clock.
    """
    if status is Status.IN_PROGRESS and not lease_over:
        return Decision.WAIT
    is_unknown = status is Status.PARKED or (status is Status.IN_PROGRESS and recovery is not Recovery.REEXECUTE)
    if retention_over and not is_unknown:
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
