"""What the demo and the tests start is killed whole, started again, and outlives nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from django.conf import settings

from testproject.harness.processes import Daemon, Keeper, ProcessError, short_directory, start_again
from tests.providers import PATIENCE, eventually

#: Owns two processes, kills one of them, and dies.
OWNER = """
import os, signal, sys
from pathlib import Path
from testproject.harness.processes import Daemon
for name in ("one", "two"):
    daemon = Daemon(name, ["sh", "-c", "echo $$; sleep 1000 & wait"], Path(sys.argv[1]))
    daemon.start()
daemon.kill()
while not Path(sys.argv[1], "one.log").read_text().strip():
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""


def is_alive(pid: int) -> bool:
    """A zombie is dead; a container may have nobody to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_daemon_is_killed_with_what_it_forked_and_started_again(tmp_path: Path) -> None:
    children = tmp_path / "children"
    script = f"sleep 1000 & echo $! >> {children}; wait"
    with Daemon(
        "test", ["sh", "-c", script], tmp_path, is_ready=lambda: children.exists() and "\n" in children.read_text()
    ) as daemon:
        first = int(children.read_text())
        assert is_alive(first)
        daemon.kill()
        assert eventually(lambda: not is_alive(first))
        children.unlink()
        daemon.start()
        second = int(children.read_text())
        assert is_alive(second)
    assert eventually(lambda: not is_alive(second))


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_daemon_that_does_not_start_is_reported_with_its_log(tmp_path: Path, is_ready: bool) -> None:
    daemon = Daemon("test", ["sh", "-c", "echo no luck"], tmp_path, is_ready=lambda: is_ready and not daemon.alive)
    with pytest.raises(ProcessError, match="no luck"), daemon:
        pass


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon("worker", ["sleep", "1000"], tmp_path)
    yield daemon
    daemon.kill()


def test_what_ends_by_itself_is_started_again(sleeper: Daemon) -> None:
    keeper = Keeper(partial(start_again, sleeper))
    os.kill(sleeper.pid, signal.SIGKILL)
    assert eventually(lambda: len(keeper.started) == 2)
    keeper.stop()
    assert (keeper.restarts, keeper.error) == (1, None)


@pytest.mark.parametrize(
    ("killed", "outages", "complaint"),
    [(2, 0, ""), (1, 1, ""), (0, 2, ""), (0, 0, "2 times, 0 times"), (1, 0, "1 times, 0"), (0, 1, "2 times, 1 times")],
)
def test_an_end_is_excused_by_a_killing_or_by_an_outage(
    sleeper: Daemon, killed: int, outages: int, complaint: str
) -> None:
    keeper = Keeper(partial(start_again, sleeper), killed=lambda: killed, outages=lambda: outages)
    for restarts in (1, 2):
        os.kill(sleeper.pid, signal.SIGKILL)
        assert eventually(lambda restarts=restarts: keeper.restarts == restarts)
    keeper.stop()
    assert keeper.ended == 2 - killed
    assert complaint in keeper.complaint()
    assert bool(keeper.complaint()) == bool(complaint)


def test_what_does_not_start_again_is_reported(sleeper: Daemon) -> None:
    def start() -> Daemon:
        if sleeper.log.exists():
            raise ProcessError("no luck")
        return start_again(sleeper)

    keeper = Keeper(start, outages=lambda: 1)
    sleeper.kill()
    assert eventually(lambda: str(keeper.error) == "no luck")
    keeper.stop()
    assert keeper.complaint() == "could not be started again: no luck"


def test_nothing_outlives_an_owner_that_was_killed(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", OWNER, str(tmp_path)], cwd=settings.BASE_DIR, timeout=PATIENCE, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    pid = int((tmp_path / "one.log").read_text())
    assert eventually(lambda: not is_alive(pid))


def test_a_sockets_directory_is_short_wherever_temporary_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("deep" * 20)))
    with short_directory("test-") as directory:
        assert len(str(directory / ".s.PGSQL.5432")) < 103
    assert not directory.exists()
