"""What the demo starts is killed whole, started again, and outlives nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from django.conf import settings

from testproject.demo.broker import RedisMissingError, find_redis
from testproject.demo.processes import Daemon, ProcessError, guarded
from tests.database.processes import start
from tests.providers import PATIENCE, eventually


class TestProcesses:
    def test_a_process_is_killed_with_what_it_forked_and_started_again(self, tmp_path: Path) -> None:
        children = tmp_path / "children"
        script = f"sleep 1000 & echo $! >> {children}; wait"
        with guarded() as guard:
            daemon = Daemon("test", ["sh", "-c", script], guard, tmp_path, is_ready=lambda: is_written(children, 1))
            with daemon.running():
                first = int(children.read_text())
                assert is_alive(first)
                daemon.kill()
                assert eventually(lambda: not is_alive(first))
                assert not daemon.has_ended()  # by itself
                children.unlink()
                daemon.start()
                second = int(children.read_text())
                assert is_alive(second)
            assert eventually(lambda: not is_alive(second))
        assert daemon.kills == 1

    def test_a_process_that_does_not_start_is_reported_with_its_log(self, tmp_path: Path) -> None:
        with guarded() as guard:
            daemon = Daemon("test", ["sh", "-c", "echo no luck"], guard, tmp_path, is_ready=lambda: False)
            with pytest.raises(ProcessError, match="no luck"), daemon.running():
                pass

    def test_one_that_ends_by_itself_is_noticed(self, tmp_path: Path) -> None:
        with guarded() as guard:
            daemon = Daemon("test", ["true"], guard, tmp_path)
            with daemon.running():
                assert eventually(daemon.has_ended)

    def test_nothing_outlives_an_owner_that_was_killed(self, tmp_path: Path) -> None:
        script = """
import os, signal, sys
from pathlib import Path
from testproject.demo.processes import Daemon, guarded
with guarded() as guard:
    for name in ("one", "two"):
        daemon = Daemon(name, ["sh", "-c", "echo $$; sleep 1000 & wait"], guard, Path(sys.argv[1]))
        daemon.start()
    daemon.kill()
    while not Path(sys.argv[1], "one.log").read_text().strip():
        pass
    os.kill(os.getpid(), signal.SIGKILL)
"""
        ended = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)], cwd=settings.BASE_DIR, timeout=PATIENCE, check=False
        )
        assert ended.returncode == -signal.SIGKILL
        pid = int((tmp_path / "one.log").read_text())
        assert eventually(lambda: not is_alive(pid))


def is_written(path: Path, lines: int) -> bool:
    return path.exists() and path.read_text().count("\n") >= lines


def is_alive(pid: int) -> bool:
    """A zombie is dead; a container may have nobody to reap it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return not Path("/proc/self/stat").exists()
    return state not in "ZX"


@pytest.mark.django_db(transaction=True)
def test_relay_worker_and_broker_end_with_a_demo_that_was_killed(tmp_path: Path, short_directory: Path) -> None:
    try:
        find_redis()
    except RedisMissingError as error:
        if sys.version_info < (3, 13):
            raise
        pytest.skip(str(error))
    script = """
import os, signal, sys
from pathlib import Path
from testproject.demo.broker import running_redis
from testproject.demo.hop import running_hop
from testproject.demo.plan import Plan
from testproject.demo.processes import guarded
with guarded() as guard, running_redis(guard) as redis:
    os.environ["BROKER_URL"] = redis.url
    with running_hop(redis, guard, Plan(), Path(sys.argv[1]), "run", {}) as hop:
        print(*(daemon.pid for daemon in hop.daemons), flush=True)
        sys.stdin.read()
"""
    directory = tmp_path / "logs"
    directory.mkdir()
    with start(script, str(directory), env={"TMPDIR": str(short_directory)}) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 3
        assert all(is_alive(pid) for pid in pids)
        owner.kill()
    for pid in pids:
        assert eventually(lambda pid=pid: not is_alive(pid))  # type: ignore[misc]
