"""What the demo and the tests start is killed whole, started again, and outlives nobody; and how it is struck."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from django.conf import settings

from testproject.demo.life import STORMY, Life
from testproject.harness.processes import Daemon, Keeper, ProcessError, short_directory, start_again
from testproject.harness.strikes import Marks, Strike, Strikes, held, read, written
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


# What is started again, and what excuses an end, is tested in ``tests/demo/test_hop.py``.


def test_what_does_not_start_again_is_reported(tmp_path: Path) -> None:
    sleeper = Daemon("worker", ["sleep", "1000"], tmp_path)

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


# A strike hits whom it is meant for, as often as planned, and leaves a mark that outlives it


def forked(work: Callable[[], object], *, group: bool = False) -> int:
    """The status with which a forked process ends that does the work; negative, if a signal ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            if group:
                os.setsid()
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def struck(tmp_path: Path, strike: Strike, *passes: tuple[str, str]) -> int:
    def work() -> None:
        for place, label in passes:
            Strikes(Marks(tmp_path), read(written([strike]))).at(place, label)

    return forked(work, group=True)


@pytest.mark.parametrize("act", ["child", "group"])
def test_a_process_kills_itself_at_its_place_with_its_message_once(tmp_path: Path, act: str) -> None:
    strike = Strike("work", act, label="a-1")

    assert struck(tmp_path, strike, ("start", "a-1"), ("work", "a-2"), ("work", "b-1")) == 0
    assert struck(tmp_path, strike, ("work", "a-1")) == -signal.SIGKILL
    assert struck(tmp_path, strike, ("work", "a-1")) == 0
    assert [path.name for path in Marks(tmp_path).found("*")] == [f"{act}.a-1.1"]


def test_one_in_so_many_messages_is_struck_so_many_times(tmp_path: Path) -> None:
    strike = Strike("work", "child", every=2, times=2)
    ends = [struck(tmp_path, strike, ("work", f"a-{number}")) for number in range(4) for _ in range(3)]

    assert [end == -signal.SIGKILL for end in ends] == [True, True, False, False, False, False] * 2


def test_two_strikes_may_be_about_different_messages() -> None:
    strike = Strike("work", "child", every=4, offset=2, among="-kept-")
    labels = [f"run-{kind}-{number}" for kind in ("kept", "plain") for number in range(8)]

    met = [label for label in labels if strike.meets("work", label, int(label.rpartition("-")[2]))]
    assert met == ["run-kept-2", "run-kept-6"]


def test_where_nobody_knows_of_messages_passes_are_counted(tmp_path: Path) -> None:
    def work() -> None:
        at_place = Strikes(Marks(tmp_path), [Strike("relay.published", "child", every=3)]).each("relay.published")
        for _ in range(3):
            Marks(tmp_path).note("passes", "one")
            at_place()

    assert [forked(work), forked(work)] == [-signal.SIGKILL, 0]
    assert Marks(tmp_path).notes("passes") == ["one"] * 6


def test_who_is_held_goes_on_when_it_is_told_to(tmp_path: Path) -> None:
    marks, strikes = Marks(tmp_path), Strikes(Marks(tmp_path), [Strike("work", "hold")])
    thread = threading.Thread(target=strikes.at, args=("work", "task.a-1"))
    thread.start()
    assert eventually(lambda: held(marks) == ["task.a-1"])
    assert thread.is_alive()
    marks.leave("go.task.a-1")
    thread.join(60)
    assert not thread.is_alive()
    assert held(marks) == []


def test_a_mark_is_left_once_with_its_text(tmp_path: Path) -> None:
    assert [Marks(tmp_path).leave("a", "first"), Marks(tmp_path).leave("a", "second")] == [True, False]
    assert Marks(tmp_path).found("*")[0].read_text() == "first"


def test_a_worker_that_stands_still_is_killed_when_it_goes_on(tmp_path: Path) -> None:
    """And not before, or it could not find that its claim was taken over."""
    marks = Marks(tmp_path)

    def work() -> None:
        life = Life(marks)
        life.stand("protected.1")
        threading.Thread(target=life.end, args=("protected.2",)).start()
        eventually(lambda: bool(life._changed._waiters))  # type: ignore[attr-defined]  # it waits, and is not dead
        marks.note("waits", str(marks.exists("met.protected.2")))
        life.go_on()
        threading.Event().wait(60)

    assert forked(work) == -signal.SIGKILL
    assert marks.notes("waits") == ["False"]
    assert {path.name.partition(".")[0] for path in marks.found("*.*")} == {"met", "died"}
    assert marks.count("met.*") == 2


def test_workers_die_at_random_in_a_storm_only(tmp_path: Path) -> None:
    marks = Marks(tmp_path)

    def work() -> None:
        life = Life(marks)
        threading.Thread(target=life.end_at_random, args=(0.001,), daemon=True).start()
        for mark in ("in calm weather", STORMY):
            life.stand("protected.1")  # in a storm nobody dies who stands still
            marks.leave(mark)
            threading.Event().wait(0.1)  # a hundred chances to die wrongly
            marks.note("spared", "once")
            life.go_on()
            if mark != STORMY:
                threading.Event().wait(0.1)
        threading.Event().wait(60)

    assert forked(work) == -signal.SIGKILL
    assert marks.notes("spared") == ["once", "once"]
