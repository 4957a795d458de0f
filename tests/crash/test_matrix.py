"""The reduced matrix: every place × every fault × every declaration, one seed."""

from __future__ import annotations

import pytest

from idempotency import faults
from tests.crash.arena import Arena
from tests.crash.matrix import run_matrix
from tests.crash.points import DECLARATIONS, EXCLUSIONS, POINTS, cells

pytestmark = pytest.mark.crash


@pytest.mark.parametrize("declaration", DECLARATIONS)
def test_a_process_may_be_broken_anywhere(shared: Arena, declaration: str) -> None:
    matrix = run_matrix(shared, [cell for cell in cells() if cell.declaration == declaration])

    assert not matrix.failures, "\n".join([*map(str, matrix.failures), matrix.table(), matrix.totals()])
    assert all(verdict.fired for verdict in matrix.verdicts)
    assert sum(verdict.doubled + verdict.lost + verdict.stale_writes for verdict in matrix.verdicts) == 0


def test_the_matrix_has_every_place_that_the_package_names() -> None:
    assert set(faults.PLACES) <= set(POINTS)


def test_every_exclusion_excludes_something() -> None:
    for exclusion in EXCLUSIONS:
        databases = exclusion.databases or ("postgres",)
        assert any(exclusion.covers(cell, database) for cell in cells() for database in databases), exclusion.reason
