"""A server that is stopped in mid-load: the reduced run."""

import pytest

from tests.crash.storms import run_restarts, server_to_stop

pytestmark = pytest.mark.postgres


@pytest.mark.scenario_25
def test_a_database_stopped_in_mid_flight_loses_nothing_acknowledged_and_doubles_nothing():
    with server_to_stop() as server:
        storms = run_restarts(server, 3)
        assert storms.is_safe, storms
        assert len(storms.inside.known) >= 80, storms
        # The control: without it, the zeros above could come from a test that sees nothing.
        server.stop_being_durable()
        control = run_restarts(server, 2)
        assert control.inside.lost > 0, control
