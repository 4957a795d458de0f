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
def daemons(tmp_path: Path) -> Iterator[dict[str, Daemon]]:
    started = {name: Daemon(name, ["sh", "-c", "echo its log; sleep 1000"], tmp_path) for name in ("relay", "worker")}
    yield started
    for daemon in started.values():
        daemon.kill()


@pytest.fixture
def hop(daemons: dict[str, Daemon], tmp_path: Path) -> Iterator[Hop]:
    skip_without_redis()
    (tmp_path / "marks").mkdir()
    hop = Hop(Redis(tmp_path, "no"), Marks(tmp_path / "marks"), list(daemons.values()), Books("run", {}))
    yield hop
    hop.stop()


def end(hop: Hop, daemon: Daemon) -> None:
    """As a fault of its own ends it, and wait until it is there again."""
    restarts = hop.keepers[daemon].restarts
    os.kill(daemon.pid, signal.SIGKILL)
    assert eventually(lambda: hop.keepers[daemon].restarts > restarts)


@pytest.mark.parametrize("name", ["relay", "worker"])
def test_one_that_ends_with_the_broker_is_started_again_and_counted(
    hop: Hop, daemons: dict[str, Daemon], tmp_path: Path, name: str
) -> None:
    Marks(tmp_path / "marks").leave("go.receipt.a-1")
    end(hop, daemons[name])
    assert (hop.ended, hop.what_stopped()) == (1, [])


@pytest.mark.parametrize(("outages", "ends"), [(0, 1), (1, 2)])
def test_one_that_ends_without_an_outage_or_keeps_ending_fails_the_run_with_its_log(
    hop: Hop, daemons: dict[str, Daemon], tmp_path: Path, outages: int, ends: int
) -> None:
    for number in range(outages):
        Marks(tmp_path / "marks").leave(f"go.receipt.a-{number}")
    for _ in range(ends):
        end(hop, daemons["worker"])
    (complaint,) = hop.what_stopped()
    assert complaint.startswith(f"The worker ended by itself {ends} times")
    assert "its log" in complaint


@pytest.mark.parametrize(("name", "mark"), [("relay", "child.relay.published.1"), ("worker", "group.fee.a-1.1")])
def test_one_that_was_killed_on_purpose_is_not_counted(
    hop: Hop, daemons: dict[str, Daemon], tmp_path: Path, name: str, mark: str
) -> None:
    Marks(tmp_path / "marks").leave(mark)
    end(hop, daemons[name])
    assert (hop.ended, hop.what_stopped()) == (0, [])


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
