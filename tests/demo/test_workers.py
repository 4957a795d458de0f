"""Who of the demo's server workers is killed, and what counts as the trouble that was asked for."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from testproject.demo.tally import Tally
from testproject.demo.workers import Workers


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def told(*lines: str) -> Tally:
    """What is noted once all of this has been reported."""
    tally = Tally()
    here, there = socket.socketpair()
    with there:
        workers = Workers(here, tally)
        there.sendall("".join(f"{line}\n" for line in lines).encode())
    workers._listener.join(60)
    workers.close()
    return tally


def test_a_worker_that_stands_still_is_killed_when_it_goes_on(worker: subprocess.Popen[bytes]) -> None:
    pid = worker.pid
    tally = told(f"born {pid}", f"stalled {pid} protected 1", f"kill {pid} protected 2")
    assert tally.was_troubled("protected", 1)
    assert tally.was_troubled("protected", 2)
    assert worker.poll() is None
    told(f"born {pid}", f"stalled {pid} protected 1", f"kill {pid} protected 2", f"awake {pid} protected 1")
    assert worker.wait(60) == -signal.SIGKILL


def test_a_stall_in_a_worker_that_is_dead_by_then_is_still_due(worker: subprocess.Popen[bytes]) -> None:
    pid = worker.pid
    tally = told(f"born {pid}", f"kill {pid} protected 2", f"stalled {pid} protected 1")
    assert worker.wait(60) == -signal.SIGKILL
    assert tally.was_troubled("protected", 2)
    assert not tally.was_troubled("protected", 1)
