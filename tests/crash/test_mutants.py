"""Deliberately broken variants of the package: a harness that does not see them sees nothing.

Each one is put in force in the workers of a few cells. The same cells pass without it, or the test proves nothing.
"""

from __future__ import annotations

import pytest

from tests.crash.arena import Arena
from tests.crash.matrix import run_matrix
from tests.crash.mutations import MUTATIONS
from tests.crash.points import Cell

# They break the statements of the PostgreSQL module.
pytestmark = pytest.mark.postgres

#: For each mutation the cells that have to fail, and what has to be seen in at least one of them.
CAUGHT_BY = {
    "without_attempt": ([("handler.wrote", "stop-live", "inside"), ("release.before", "stop-live", "inside")], "P6"),
    "completion_on_its_own": ([("on_commit", "kill", "inside")], "P1: doubled"),
    "release_unfenced": (
        [("release.before", "stop", "inside"), ("release.before", "stop-live", "again")],
        "P1: doubled",
    ),
    "clock_of_the_application": ([("step.started", "skew", "ask")], "P1: doubled"),
    "park_runs_again": ([("downstream.answered", "kill", "park"), ("downstream.sent", "kill", "park")], "P1: doubled"),
    "step_unfenced": ([("handler.wrote", "stop-live", "ask", 2)], "P1: doubled"),
    "take_over_of_the_living": ([("step.started", "skew", "ask")], "P1: doubled"),
    "not_executed_is_assumed": ([("downstream.answered", "kill", "ask")], "P1: doubled"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_variant_is_caught(shared: Arena, mutation: str) -> None:
    places, seen = CAUGHT_BY[mutation]
    cells = [Cell(*place) for place in places]

    assert not run_matrix(shared, cells).failures

    broken = run_matrix(shared, cells, mutations=(mutation,))
    assert len(broken.failures) == len(cells), "it survived"
    assert any(seen in problem for verdict in broken.failures for problem in verdict.problems), broken.failures
