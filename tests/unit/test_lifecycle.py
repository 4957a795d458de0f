"""The decision table of the design, cell by cell. It is pure, so all of it can be looked at."""

from __future__ import annotations

import itertools

import pytest

from idempotency.lifecycle import Decision, Recovery, Status, decide

EVERY_CELL = list(itertools.product(Status, [False, True], [False, True], [False, True], Recovery))


def cell(status: Status, **facts: bool | Recovery) -> Decision:
    known: dict[str, object] = {
        "lease_over": False,
        "retention_over": False,
        "same_payload": True,
        "recovery": Recovery.REEXECUTE,
    }
    return decide(status, **(known | facts))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "lease_over", "same_payload", "expected"),
    [
        (Status.COMPLETED, False, True, Decision.REPLAY),
        (Status.COMPLETED, False, False, Decision.REFUSE_REUSED),
        (Status.IN_PROGRESS, False, True, Decision.WAIT),
        (Status.IN_PROGRESS, False, False, Decision.WAIT),
        (Status.IN_PROGRESS, True, True, Decision.TAKE_OVER),
        (Status.IN_PROGRESS, True, False, Decision.REFUSE_REUSED),
        (Status.RECOVERABLE, False, True, Decision.TAKE_OVER),
        (Status.RECOVERABLE, False, False, Decision.REFUSE_REUSED),
        (Status.PARKED, False, True, Decision.REPORT_PARKED),
        (Status.PARKED, False, False, Decision.REFUSE_REUSED),
    ],
)
def test_a_duplicate_gets_what_the_design_says(
    status: Status, lease_over: bool, same_payload: bool, expected: Decision
) -> None:
    assert cell(status, lease_over=lease_over, same_payload=same_payload) is expected


@pytest.mark.parametrize(
    ("recovery", "expected"),
    [
        (Recovery.REEXECUTE, Decision.TAKE_OVER),
        (Recovery.RECONCILE, Decision.RECONCILE),
        (Recovery.PARK, Decision.PARK),
    ],
)
def test_an_abandoned_claim_is_recovered_as_its_operation_declares(recovery: Recovery, expected: Decision) -> None:
    assert cell(Status.IN_PROGRESS, lease_over=True, recovery=recovery) is expected


@pytest.mark.parametrize(("status", "lease_over", "retention_over", "same_payload", "recovery"), EVERY_CELL)
def test_every_cell_keeps_the_promises(
    status: Status, lease_over: bool, retention_over: bool, same_payload: bool, recovery: Recovery
) -> None:
    decision = decide(
        status,
        lease_over=lease_over,
        retention_over=retention_over,
        same_payload=same_payload,
        recovery=recovery,
    )
    live = status is Status.IN_PROGRESS and not lease_over
    # A live claim is waited for, and nothing else is.
    assert (decision is Decision.WAIT) == live
    # Retention over: a new request, and only then may another payload run.
    assert (decision is Decision.START_OVER) == (retention_over and not live)
    if not same_payload and not retention_over and not live:
        assert decision is Decision.REFUSE_REUSED
    # P5: an outcome within retention is replayed or refused, never run again.
    if status is Status.COMPLETED and not retention_over:
        assert decision in {Decision.REPLAY, Decision.REFUSE_REUSED}
    # An operation that never declared REEXECUTE is not run again after a crash.
    if status is Status.IN_PROGRESS and recovery is not Recovery.REEXECUTE and not retention_over:
        assert decision is not Decision.TAKE_OVER
    # What is parked stays parked until somebody has found out, or nobody asks any more.
    if status is Status.PARKED and not retention_over:
        assert decision in {Decision.REPORT_PARKED, Decision.REFUSE_REUSED}


def test_a_status_is_written_as_its_value() -> None:
    assert f"{Status.IN_PROGRESS!s}" == "in_progress"
