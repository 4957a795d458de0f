"""A server stopped under load, and a primary killed so that its standby takes over: the reduced runs.

Each has a control: without one, zero failures could mean that the test detects nothing.
"""

import pytest

from tests.crash.failover import run_failover
from tests.crash.storms import run_restarts, server_to_stop

pytestmark = pytest.mark.postgres


@pytest.mark.scenario_25
def test_a_database_stop_loses_nothing_acknowledged_and_doubles_nothing():
    with server_to_stop() as server:
        storms = run_restarts(server, 3)
        assert storms.is_safe, storms
        assert len(storms.inside.known) >= 80, storms
        server.stop_being_durable()
        control = run_restarts(server, 2)
        assert control.inside.unexplained, control


def test_a_synchronous_standby_loses_and_doubles_nothing():
    result = run_failover("on")

    assert result.storms.is_safe, result
    assert not result.warned
    assert min(len(storm.known) for storm in result.storms.all) >= 40, result


def test_an_asynchronous_standby_loses_records_and_repeats_outside_effects():
    result = run_failover("asynchronous")
    storms = result.storms

    assert storms.is_whole, result
    assert result.warned
    # A few of those that were acknowledged during the lag had committed before it.
    assert min(len(storms.inside.unexplained), storms.ask.doubled, storms.park.doubled) >= 10, result
