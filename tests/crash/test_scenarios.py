"""Crash scenarios outside the matrix, with real processes. Effects are counted in the ledger and the database."""

import pytest

from tests.crash.cells import HOUR, run_cell, running
from tests.crash.points import DECLARATIONS, LATE_CALL, Cell
from tests.harness.answers import facts_of
from tests.harness.zygote import wait_until

#: How many abandoned claims a sweep finds in scenario 26.
CLAIMS = 12
SETTLED = ("recoverable", "completed", "parked")


def other_cell(place, fault, declaration, *marks, doubled=0, **spec):
    return pytest.param(Cell(place, fault, declaration), doubled, spec, marks=marks)


@pytest.mark.parametrize(
    ("cell", "doubled", "spec"),
    [
        # Wrong clocks of processes have no effect.
        *(other_cell("claim.committed", "skew", each, pytest.mark.failure_5) for each in DECLARATIONS),
        # A process that waits inside its transaction holds SQLite's only write lock.
        other_cell("handler.wrote", "skew", "inside", pytest.mark.failure_5, pytest.mark.postgres),
        # The documented limit: no fence stops a late outside call by a frozen process. In the matrix, the call has a
        # deadline, and the provider refuses it.
        other_cell(*LATE_CALL, "stop", "ask", pytest.mark.failure_3, doubled=1, without_deadline=True),
        # The answer of a reconciler that outlived its lease is outdated, because another attempt has run the operation
        # since.
        other_cell("reconcile.found", "stop", "ask", stepless=True, without_deadline=True),
        # A frozen purge doesn't block a key for long. On SQLite all other writers wait for a frozen one.
        other_cell("purge.selected", "stop", "inside", pytest.mark.postgres, wanted=True),
    ],
    ids=str,
)
def test_only_a_call_without_a_deadline_is_made_twice(shared, cell, doubled, spec):
    verdict = run_cell(shared, cell, **spec)
    assert verdict.fired
    assert (verdict.doubled, bool(verdict.problems)) == (doubled, bool(doubled)), verdict


@pytest.fixture
def run(shared, request):
    """Processes of one operation, under the declaration that the test is parametrized with."""
    with running(shared, Cell("scenario", "none", request.param)) as made:
        yield made


def states(run, keys):
    records = [run.observer.record(key) for key in keys]
    return {"gone" if record is None else record["status"] for record in records}


@pytest.mark.scenario_26
@pytest.mark.parametrize(
    ("run", "fault", "passes"),
    [
        *((declaration, "kill", 0) for declaration in DECLARATIONS),
        ("ask", "kill", 3),
        *((declaration, "gate", 0) for declaration in ("again", "ask", "park")),
    ],
    indirect=["run"],
)
def test_a_killed_or_concurrent_recovery_settles_each_claim_once(run, fault, passes):
    """The claims belong to killed processes. Every second process was killed after its payout."""
    keys = [f"{run.key}-{number}" for number in range(CLAIMS)]
    for number, key in enumerate(keys):
        run.kill_at("downstream.answered" if number % 2 else "handler.before", key=key)
    run.observer.end_lease()
    reconciles, parks = run.cell.declaration == "ask", run.cell.declaration == "park"
    place = "sweep.selected" if not reconciles else "reconcile.found" if fault == "kill" else "reconcile.before"
    first = run.fork("sweep", arms=[[place, fault, passes]])
    first.expect("reached")
    if fault == "kill":
        run.bury(first)
        run.observer.end_lease()  # of the claim that it was settling
        run.answered(run.fork("sweep"))
    else:
        second = run.fork("sweep").expect("done")
        first.go()
        both = [first.expect("done"), second]
        # SQLite has one writer at a time, so it may refuse the second sweep until the first one has ended.
        refused = [sweep for sweep in both if "crashed" in sweep]
        assert not refused or run.observer.path is not None, refused
        assert sum(sweep["swept"][name] for sweep in both if "swept" in sweep for name in SETTLED) == CLAIMS, both

    settled = {"completed", "recoverable"} if reconciles else {"parked"} if parks else {"recoverable"}
    assert states(run, keys) == settled
    for key in keys:
        answer = run.ask(key=key)
        if parks:
            assert answer["code"] == "idempotency_outcome_unknown"
        else:
            assert (bool(facts_of(answer["body"])), len(run.payouts(key))) == (True, 1)
    assert states(run, keys) == ({"parked"} if parks else {"completed"})


@pytest.mark.postgres
@pytest.mark.parametrize("run", ["inside"], indirect=True)
@pytest.mark.parametrize(
    ("point", "attempt"),
    [
        ("claim.committed", 2),
        ("handler.wrote", 2),
        ("complete.before", 2),
        ("commit.sent", 1),
        ("complete.committed", 1),
    ],
)
def test_a_killed_worker_frees_its_key_although_its_lease_is_running(run, point, attempt):
    run.kill_at(point, lease=HOUR)
    wait_until(lambda: facts_of(run.ask(lease=HOUR)["body"]), "a retry runs or gets the outcome")
    assert run.observer.record(run.key)["attempt"] == attempt
    run.judge()
    assert run.verdict.problems == []


@pytest.mark.postgres
@pytest.mark.parametrize("run", ["inside"], indirect=True)
def test_a_sweep_settles_a_killed_workers_claim_before_its_lease_ends(run):
    run.kill_at("handler.wrote", lease=HOUR)
    run.answered(run.fork("sweep"))
    assert run.observer.record(run.key)["status"] == "recoverable"
    run.converge()
    run.judge()
    assert run.verdict.problems == []
