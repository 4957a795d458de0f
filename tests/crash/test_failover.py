"""The primary is killed and its standby promoted, under load. ``python -m tools.crashes --failover`` runs every
mode."""

import pytest

from tests.crash.failover import run_failover

pytestmark = pytest.mark.postgres


def test_a_synchronous_standby_loses_and_doubles_nothing():
    result = run_failover("on")

    assert result.storms.is_safe, result
    assert not result.warned
    assert min(len(storm.known) for storm in result.storms.all) >= 40, result


def test_an_asynchronous_standby_loses_effects_with_their_records_and_doubles_those_outside():
    """The control: without it, the zeros of a synchronous standby could come from a test that sees nothing."""
    result = run_failover("asynchronous")
    storms = result.storms

    assert storms.is_whole, result
    assert result.warned
    # A few of those that were acknowledged during the lag had committed before it.
    assert min(storms.inside.lost, storms.ask.doubled, storms.park.doubled) >= 10, result
