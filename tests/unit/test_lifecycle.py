"""The decision table, cell by cell. ``decide`` is a pure function, so every cell is checked."""

import itertools

import pytest

from idempotency.lifecycle import Decision, Recovery, Status, decide

EVERY_CELL = list(itertools.product(Status, [False, True], [False, True], [False, True], Recovery))


@pytest.mark.parametrize(
    ("status", "lease_over", "recovery", "same", "other"),
    [
        (Status.COMPLETED, False, Recovery.REEXECUTE, Decision.REPLAY, Decision.REFUSE_REUSED),
        (Status.IN_PROGRESS, False, Recovery.REEXECUTE, Decision.WAIT, Decision.WAIT),
        (Status.IN_PROGRESS, True, Recovery.REEXECUTE, Decision.TAKE_OVER, Decision.REFUSE_REUSED),
        (Status.IN_PROGRESS, True, Recovery.RECONCILE, Decision.RECONCILE, Decision.REFUSE_REUSED),
        (Status.IN_PROGRESS, True, Recovery.PARK, Decision.PARK, Decision.REFUSE_REUSED),
        (Status.RECOVERABLE, False, Recovery.REEXECUTE, Decision.TAKE_OVER, Decision.REFUSE_REUSED),
        (Status.PARKED, False, Recovery.REEXECUTE, Decision.REPORT_PARKED, Decision.REFUSE_REUSED),
    ],
)
def test_a_duplicate_gets_the_decision_of_the_table(status, lease_over, recovery, same, other):
    cell = {"lease_over": lease_over, "retention_over": False, "recovery": recovery}
    assert [decide(status, same_payload=each, **cell) for each in (True, False)] == [same, other]


@pytest.mark.parametrize(("status", "lease_over", "retention_over", "same_payload", "recovery"), EVERY_CELL)
def test_every_cell_keeps_the_promises(status, lease_over, retention_over, same_payload, recovery):
    decision = decide(
        status, lease_over=lease_over, retention_over=retention_over, same_payload=same_payload, recovery=recovery
    )
    live = status is Status.IN_PROGRESS and not lease_over
    # A duplicate waits for a live claim, and only for that.
    assert (decision is Decision.WAIT) == live
    # Retention ends known outcomes. An unknown one stays unknown until it is settled or an operator decides.
    unknown = status is Status.PARKED or (status is Status.IN_PROGRESS and recovery is not Recovery.REEXECUTE)
    # After the retention of a known record a request is new. Only then may another payload run.
    assert (decision is Decision.START_OVER) == (retention_over and not live and not unknown)
    if live or (retention_over and not unknown):
        return
    assert (decision is Decision.REFUSE_REUSED) == (not same_payload)
    # P5: an outcome within retention is replayed or refused, never run again.
    if status is Status.COMPLETED:
        assert decision in {Decision.REPLAY, Decision.REFUSE_REUSED}
    # An operation that never declared REEXECUTE is not run again after a crash.
    if status is Status.IN_PROGRESS and recovery is not Recovery.REEXECUTE:
        assert decision is not Decision.TAKE_OVER
    # A parked record stays parked until an operator resolves it.
    if status is Status.PARKED:
        assert decision in {Decision.REPORT_PARKED, Decision.REFUSE_REUSED}
