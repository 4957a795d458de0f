"""Relay and worker of the demo are started again when they have ended, and a run fails where one keeps ending."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from testproject.demo import hop as demo_hop
from testproject.demo.books import Books
from testproject.demo.hop import Hop
from testproject.harness.processes import Daemon
from testproject.harness.redis import Redis
from testproject.harness.strikes import Marks
from tests.harness.redis import skip_without_redis
from tests.providers import eventually


@pytest.fixture
def hop(tmp_path: Path) -> Iterator[Hop]:
    skip_without_redis()

    def daemon(name: str) -> Daemon:
        log, command = tmp_path / f"{name}.log", ["sh", "-c", "echo its log; sleep 1000"]
        # Ready when it has written to its log, so that it is never killed before.
        return Daemon(name, command, tmp_path, is_ready=lambda: bool(log.read_text()))

    daemons = [daemon("relay"), daemon("worker")]
    hop = Hop(Redis(tmp_path, "no"), Marks(tmp_path), daemons, Books("run", {}))
    yield hop
    hop.stop()
    for one in daemons:
        one.kill()


@pytest.mark.parametrize(
    ("name", "marks", "ends", "counted", "excused"),
    [
        ("relay", "go.receipt.a-1", 1, 1, True),  # the broker was killed
        ("worker", "go.receipt.a-1", 1, 1, True),
        ("worker", "go.receipt.a-1", 2, 2, False),
        ("worker", "go.receipt.a-1 go.receipt.a-2", 2, 2, True),
        ("worker", "", 1, 1, False),
        ("relay", "child.relay.published.1", 1, 0, True),  # it was killed itself
        ("worker", "group.fee.a-1.1", 1, 0, True),
        ("worker", "group.fee.a-1.1", 2, 1, False),
        ("worker", "group.fee.a-1.1 go.receipt.a-1", 2, 1, True),
    ],
)
def test_one_that_has_ended_is_started_again_and_fails_the_run_unless_it_or_the_broker_was_killed(
    hop: Hop, tmp_path: Path, name: str, marks: str, ends: int, counted: int, excused: bool
) -> None:
    for mark in marks.split():
        Marks(tmp_path).leave(mark)
    ((daemon, keeper),) = [(daemon, keeper) for daemon, keeper in hop.keepers.items() if daemon.name == name]
    for restarts in range(1, ends + 1):
        os.kill(daemon.pid, signal.SIGKILL)
        assert eventually(lambda restarts=restarts: keeper.restarts == restarts)
    assert hop.ended == counted
    complaints = hop.what_stopped()
    assert len(complaints) == (0 if excused else 1)
    for complaint in complaints:
        assert complaint.startswith(f"The {name} ended by itself {counted} times")
        assert "its log" in complaint


def test_it_is_not_over_while_a_message_that_is_not_lost_has_had_no_effect(
    hop: Hop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker was killed, and the next one takes its time to come up: nothing moves, and it is not over."""
    done: list[bool] = [False]
    monkeypatch.setattr(demo_hop, "STALLED_AFTER", -1.0)
    monkeypatch.setattr(demo_hop, "resend_lost_messages", lambda **options: 0)
    monkeypatch.setattr(Redis, "count", lambda redis, queue: 1)
    monkeypatch.setattr(Books, "are_messages_pending", lambda books: False)
    monkeypatch.setattr(Books, "are_messages_done", lambda books: done[0])
    assert not hop.is_over()
    done[0] = True
    assert hop.is_over()
