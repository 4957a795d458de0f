"""The reduced matrix: every place × every fault × every declaration, one seed."""

import pytest

from idempotency.protocol import faults
from tests.crash.cells import run_cell
from tests.crash.matrix import run_matrix
from tests.crash.points import DATABASES, DECLARATIONS, EXCLUSIONS, FAULTS, POINTS, Cell, cells, covers, excluded

KILLED = (pytest.mark.scenario_3, pytest.mark.scenario_4, pytest.mark.scenario_22, pytest.mark.failure_34)
WOKEN = (pytest.mark.scenario_23, pytest.mark.scenario_24)

#: The scenarios of each column: a downstream effect is not repeated, a claim is recovered after its lease, and a kill
#: in the handler leaves one effect. An attempt that slept past its lease leaves no effect, and its failure releases no
#: other attempt's claim. One of the ended sessions has sent its COMMIT.
SCENARIOS = {
    "kill": dict.fromkeys(DECLARATIONS, KILLED),
    "drop": dict.fromkeys(DECLARATIONS, (pytest.mark.failure_12,)),
    "stop": {"inside": WOKEN, "again": WOKEN, "begun": WOKEN, "ask": WOKEN[:1]},
    "stop-live": {"inside": WOKEN, "again": WOKEN, "begun": WOKEN, "ask": WOKEN[:1]},
}


def columns():
    for fault in FAULTS:
        for declaration in DECLARATIONS:
            yield pytest.param(fault, declaration, marks=SCENARIOS.get(fault, {}).get(declaration, ()))


@pytest.mark.parametrize(("fault", "declaration"), list(columns()))
def test_a_fault_at_any_point_doubles_and_loses_nothing(shared, fault, declaration):
    column = [cell for cell in cells() if cell.kind[1:] == (fault, declaration)]
    matrix = run_matrix(shared, column)

    assert len(matrix.verdicts) == sum(excluded(cell, shared.database) is None for cell in column)
    assert not matrix.failures, "\n".join(map(str, matrix.failures))
    assert sum(verdict.doubled + verdict.lost + verdict.stale_writes for verdict in matrix.verdicts) == 0
    if fault == "kill":
        parked = {v.parked for v in matrix.verdicts if v.cell.point.startswith("downstream.")}
        assert parked == {declaration == "park"}


@pytest.mark.failure_110
def test_without_begin_a_killed_payment_doubles_its_row(shared):
    """The control of the payment's cells."""
    places = ("handler.wrote", "render.after", "complete.before")
    verdicts = [run_cell(shared, Cell(place, "kill", "begun"), without_begin=True) for place in places]
    assert [(verdict.fired, verdict.doubled) for verdict in verdicts] == [(True, 1)] * len(places), verdicts


def test_only_a_fault_that_a_database_does_not_have_is_left_out():
    for database, left_out in (("citus", set()), ("mariadb", set()), ("postgres", set()), ("sqlite", {"drop"})):
        assert {cell.fault for cell in cells() if excluded(cell, database) is None} == set(FAULTS) - left_out


def test_the_matrix_has_every_fault_point_of_the_package():
    # An operation doesn't reach the relay's points. The outbox tests kill relays there.
    assert {place for place in faults.PLACES if not place.startswith("relay.")} <= set(POINTS)


def test_every_exclusion_excludes_something():
    for pattern, reason in EXCLUSIONS.items():
        assert any(covers(pattern, cell, database) for cell in cells() for database in DATABASES), reason
