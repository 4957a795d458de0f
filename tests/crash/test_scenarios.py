"""What is no cell of the matrix, with real processes. Effects are counted in the ledger and the database."""

import pytest

from tests.crash.cells import run_cell, running
from tests.crash.points import DECLARATIONS, LATE_CALL, Cell
from tests.harness.zygote import wait_until

#: How many abandoned claims a sweep finds in scenario 26.
CLAIMS = 12
#: Seconds: a process is killed, buried, and asked after within it, on a loaded machine too.
LEASE = 4.0
SETTLED = ("recoverable", "completed", "parked")


@pytest.fixture
def run(shared, request):
    """Processes of one operation, under the declaration that the test is marked with."""
    with running(shared, Cell("scenario", "none", getattr(request, "param", "inside"))) as made:
        yield made


@pytest.mark.scenario_4
@pytest.mark.failure_34
def test_a_killed_process_is_recovered_after_its_lease(run):
    """By the real clock: nothing is back-dated."""
    run.kill_at("handler.wrote", lease=LEASE)
    assert run.observer.writes(run.key) == []
    early = run.ask()
    wait_until(lambda: run.observer.lease_is_over(), "the lease ends")
    recovered = run.ask()

    assert (early["status"], early["code"]) == (409, "idempotency_in_progress")
    assert (recovered["status"], recovered["replayed"]) == (201, False)
    assert run.observer.writes(run.key) == ["attempt 2"]
    run.judge()
    assert not run.verdict.problems


@pytest.mark.failure_5
@pytest.mark.parametrize(
    ("point", "declaration"),
    [
        *(("claim.committed", declaration) for declaration in DECLARATIONS),
        # A process that waits inside its transaction holds SQLite's only write lock.
        pytest.param("handler.wrote", "inside", marks=pytest.mark.postgres),
    ],
)
def test_wrong_clocks_of_processes_decide_nothing(shared, point, declaration):
    verdict = run_cell(shared, Cell(point, "skew", declaration))
    assert verdict.passed, verdict


def abandon(run):
    """Claims of processes that were killed, every second one after its payout was made."""
    keys = [f"{run.key}-{number}" for number in range(CLAIMS)]
    for number, key in enumerate(keys):
        run.kill_at("downstream.answered" if number % 2 else "handler.before", key=key)
    run.observer.end_lease()
    return keys


def converge(run, keys):
    """Every retry is answered, and every operation has had its one effect."""
    for key in keys:
        assert run.ask(key=key)["status"] == 201
        assert len(run.payouts(key)) == 1
    assert states(run, keys) == {"completed"}


def states(run, keys):
    records = [run.observer.record(key) for key in keys]
    return {"gone" if record is None else record["status"] for record in records}


@pytest.mark.scenario_26
@pytest.mark.parametrize(
    ("run", "passes"), [("inside", 0), ("again", 0), ("park", 0), ("ask", 0), ("ask", 3)], indirect=["run"]
)
def test_a_recovery_killed_half_way_is_simply_run_again(run, passes):
    keys = abandon(run)
    reconciles = run.cell.declaration == "ask"
    place = "reconcile.found" if reconciles else "sweep.selected"
    killed = run.fork("sweep", arms=[[place, "kill", passes]])
    killed.expect("reached")
    run.bury(killed)

    run.observer.end_lease()  # of what the killed one was at
    run.answered(run.fork("sweep"))

    if run.cell.declaration == "park":
        assert states(run, keys) == {"parked"}
        assert {run.ask(key=key)["code"] for key in keys} == {"idempotency_outcome_unknown"}
        return
    assert states(run, keys) == ({"completed", "recoverable"} if reconciles else {"recoverable"})
    converge(run, keys)


@pytest.mark.scenario_26
@pytest.mark.parametrize("run", ["again", "ask", "park"], indirect=True)
def test_two_recoveries_at_once_settle_each_claim_once(run):
    keys = abandon(run)
    place = "reconcile.before" if run.cell.declaration == "ask" else "sweep.selected"
    first = run.fork("sweep", arms=[[place, "gate"]])
    first.expect("reached")
    second = run.fork("sweep").expect("done")
    first.go()
    both = [first.expect("done"), second]
    # SQLite has one writer at a time: the second one could not even begin while the first one had not ended.
    refused = [sweep for sweep in both if "crashed" in sweep]
    assert not refused or run.observer.path is not None, refused

    settled = [sweep["swept"][name] for sweep in both if "swept" in sweep for name in SETTLED]
    assert sum(settled) == CLAIMS, both
    if run.cell.declaration == "park":
        assert states(run, keys) == {"parked"}
    else:
        converge(run, keys)


@pytest.mark.failure_3
@pytest.mark.parametrize("guarded", [True, False])
def test_a_call_that_a_frozen_process_makes_late_is_stopped_by_a_deadline_or_by_nothing(shared, guarded):
    """The documented limit. No fence can reach a call to the outside world; a deadline that the provider keeps can."""
    cell = Cell(LATE_CALL[0], "stop", "ask")
    verdict = run_cell(shared, cell, without_deadline=not guarded)
    assert verdict.fired
    assert verdict.doubled == (0 if guarded else 1)


def test_a_reconciler_that_outlived_its_lease_lets_nothing_run(shared):
    """Its answer is true of the past only: the reconciler after it has run the operation since."""
    verdict = run_cell(shared, Cell("reconcile.found", "stop", "ask"), stepless=True, without_deadline=True)
    assert verdict.passed, verdict


@pytest.mark.postgres  # on SQLite all others wait for a frozen writer
def test_a_frozen_purge_holds_no_key_for_long(shared):
    verdict = run_cell(shared, Cell("purge.selected", "stop", "inside"), wanted=True)
    assert verdict.passed, verdict
