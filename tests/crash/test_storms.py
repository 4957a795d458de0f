"""Lost acknowledgements, and servers that are stopped in mid-load: the reduced runs."""

import pytest

from tests.crash.storms import run_lost_acknowledgements, run_restarts, server_to_stop

pytestmark = pytest.mark.postgres


@pytest.mark.scenario_25
def test_a_database_stopped_in_mid_flight_loses_nothing_acknowledged_and_doubles_nothing():
    with server_to_stop() as server:
        tally = run_restarts(server, 3)
        assert (tally.restarts, tally.lost, tally.doubled, tally.stale_writes) == (3, 0, 0, 0), tally
        assert len(tally.known) >= 80, tally
        # The control: without it, the zeros above could come from a test that sees nothing.
        server.stop_being_durable()
        control = run_restarts(server, 2)
        assert control.lost > 0, control


@pytest.mark.failure_12
def test_swallowed_acknowledgements_of_commit_lose_and_double_nothing(shared):
    tally = run_lost_acknowledgements(20, shared.url)

    assert tally.swallowed >= 20, tally
    assert tally.ambiguous >= tally.swallowed, tally
    assert (tally.lost, tally.doubled, tally.stale_writes) == (0, 0, 0), tally
