"""A power cut loses unsynced data, but nothing that was acknowledged to a client."""

import pytest

from tests.crash.storms import run_restarts
from tests.harness.disk import CAN_CUT, server_on_a_disk
from tests.results import recording

pytestmark = [pytest.mark.postgres, pytest.mark.skipif(not CAN_CUT, reason="needs root, a loop device and mkfs.ext4")]


def test_a_power_cut_loses_nothing_acknowledged_and_doubles_nothing():
    with server_on_a_disk() as server:
        storms = run_restarts(server, 3)
        with recording("cuts", database="postgres", fired=3, operations=storms.acknowledged, **storms.figures):
            assert storms.is_safe, storms
            assert len(storms.inside.known) >= 80, storms
        server.stop_being_durable()
        control = run_restarts(server, 2)
        assert control.inside.unexplained, control
