"""Lost acknowledgements, servers that are stopped in mid-load, and crowds of zombies: the reduced runs."""

from __future__ import annotations

import pytest

from tests.crash.arena import Arena
from tests.crash.matrix import run_zombies
from tests.crash.storms import NOT_DURABLE, run_lost_acknowledgements, run_restarts

pytestmark = [pytest.mark.crash, pytest.mark.postgres]


@pytest.mark.scenario(25)
def test_a_database_stopped_in_mid_flight_loses_nothing_acknowledged_and_doubles_nothing() -> None:
    tally = run_restarts(3)

    assert (tally.restarts, tally.lost, tally.doubled, tally.stale_writes) == (3, 0, 0, 0), tally
    assert len(tally.known) >= 80, tally


@pytest.mark.scenario(25)
def test_the_count_sees_what_a_server_without_durable_commits_loses() -> None:
    """The control: without it, a zero above could come from a test that sees nothing."""
    tally = run_restarts(3, parameters=NOT_DURABLE)

    assert tally.lost > 0, tally


@pytest.mark.failure_mode(12)
def test_swallowed_acknowledgements_of_commit_lose_and_double_nothing(shared: Arena) -> None:
    tally = run_lost_acknowledgements(20, shared.url)

    assert tally.swallowed >= 20, tally
    assert tally.ambiguous >= tally.swallowed, tally
    assert (tally.lost, tally.doubled, tally.stale_writes) == (0, 0, 0), tally


def test_a_crowd_of_zombies_leaves_no_trace(shared: Arena) -> None:
    crowd = run_zombies(shared, 20)

    assert not crowd.failures, "\n".join(map(str, crowd.failures))
    assert (len(crowd.verdicts), sum(verdict.stale_writes for verdict in crowd.verdicts)) == (20, 0)
