"""Deliberately broken variants of the package: the harness must detect each one.

Each one is applied in the workers of a few cells. The same cells must pass without it, or the test proves nothing.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.crash.cells import run_cell
from tests.crash.matrix import AT_ONCE
from tests.crash.mutations import MUTATIONS
from tests.crash.points import Cell

# They break the statements of the PostgreSQL module.
pytestmark = pytest.mark.postgres

#: For each mutation, the cells that must fail, and the problem that at least one must report.
CAUGHT_BY = {
    "without_attempt": ([("handler.wrote", "stop-live", "inside"), ("release.before", "stop-live", "inside")], "P6"),
    "completion_after_the_commit": ([("on_commit", "kill", "inside")], "P1: doubled"),
    "release_unfenced": (
        [("release.before", "stop", "inside"), ("release.before", "stop-live", "again")],
        "P1: doubled",
    ),
    "clock_of_the_application": ([("step.started", "skew", "ask")], "P1: doubled"),
    "park_runs_again": ([("downstream.answered", "kill", "park"), ("downstream.sent", "kill", "park")], "P1: doubled"),
    "retention_ends_the_unknown": (
        [("downstream.answered", "kill", "park"), ("downstream.answered", "raise", "park")],
        "P1: doubled",
    ),
    "step_unfenced": ([("handler.wrote", "stop-live", "ask", 2)], "P1: doubled"),
    "take_over_of_live_claims": ([("step.started", "skew", "ask")], "P1: doubled"),
    # The provider deduplicates, but only calls with the same key.
    "key_of_the_attempt": ([("downstream.answered", "kill", "again")], "P1: doubled"),
    # The overtaken attempts answer 402 and 502 there.
    "refusal_unfenced": ([("handler.wrote", "stop-live", "inside"), ("render.after", "stop-live", "again")], "P6"),
    "not_executed_is_assumed": ([("downstream.answered", "kill", "ask")], "P1: doubled"),
}


def test_every_broken_variant_is_caught(shared):
    assert set(CAUGHT_BY) == set(MUTATIONS)
    runs = [(name, Cell(*place)) for name, (places, _) in CAUGHT_BY.items() for place in places]
    with ThreadPoolExecutor(AT_ONCE) as pool:  # they wait more than they compute
        sound = [*pool.map(partial(run_cell, shared), {cell for _, cell in runs})]
        broken = [*pool.map(lambda run: (run[0], run_cell(shared, run[1], mutations=[run[0]])), runs)]
    assert all(verdict.passed for verdict in sound), sound
    survived = [(name, verdict.cell) for name, verdict in broken if verdict.passed]
    assert not survived
    for name, (_, seen) in CAUGHT_BY.items():
        problems = [problem for of, verdict in broken if of == name for problem in verdict.problems]
        assert any(seen in problem for problem in problems), (name, problems)
