"""The primary is killed and its standby promoted, under load. ``python -m tools.crashes --failover`` runs every
mode."""

import pytest

from tests.crash.failover import run_failover

pytestmark = pytest.mark.postgres


def test_a_synchronous_standby_loses_and_doubles_nothing():
    result = run_failover("on")

    assert result.is_safe, result
    assert not result.warned
    assert min(len(tally.known) for tally in (result.inside, result.ask, result.park)) >= 40, result


def test_an_asynchronous_standby_loses_effects_with_their_records_and_doubles_those_outside():
    """The control: without it, the zeros of a synchronous standby could come from a test that sees nothing."""
    result = run_failover("asynchronous")

    assert result.is_whole, result
    assert result.warned
    # A few of those that were acknowledged during the lag had committed before it.
    assert min(result.inside.lost, result.ask.doubled, result.park.doubled) >= 10, result
