"""The demo's killer: who dies when, and who goes on."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testproject.demo.killer import RELAY_DIES_AT, Killer
from testproject.demo.orders import DIRECT, OUTBOX, RECEIPT, Kill, Strike
from testproject.demo.processes import ProcessError
from tests.providers import PATIENCE, eventually


class Pool:
    """Two processes that stand for a worker's children, and daemons that note what becomes of them."""

    def __init__(self, directory: Path) -> None:
        self.address = directory / "killer.sock"
        self.done: list[str] = []
        self.daemons = [Noted(name, self.done) for name in ("relay", "worker", "broker")]
        self._started: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []

    def killer(self, strike: Strike | None = None) -> Killer:
        strikes = {} if strike is None else {("good", RECEIPT): strike}
        daemons: Any = self.daemons
        return Killer(self.address, *daemons, strikes, {"good": OUTBOX, "other": DIRECT})

    def child(self) -> subprocess.Popen[bytes]:
        self._started.append(subprocess.Popen(["sleep", "1000"]))
        return self._started[-1]

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE)
        connection.connect(str(self.address))
        self._connections.append(connection)
        return connection

    def ask(self, role: str, pid: int, place: str, label: str = "", connection: socket.socket | None = None) -> bytes:
        """What is answered; nothing if the process that asked is to be dead."""
        connection = connection or self.connect()
        words = f"testproject.tasks.send_receipt {label} id-{label}" if label else ""
        connection.sendall(f"{role} {pid} {place} {words}\n".encode())
        return connection.recv(10)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._started:
            process.kill()
            process.wait()


class Noted:
    def __init__(self, name: str, done: list[str]) -> None:
        self.kill: Callable[[], None] = lambda: done.append(f"kill {name}")
        self.start: Callable[[], None] = lambda: done.append(f"start {name}")


@pytest.fixture
def pool(short_directory: Path) -> Iterator[Pool]:
    pool = Pool(short_directory)
    yield pool
    pool.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else is there to be waited for."""
    for name in ("HOLD", "SETTLE", "OUTAGE"):
        monkeypatch.setattr(f"testproject.demo.killer.{name}", 0.01)


class TestKiller:
    def test_who_is_not_meant_goes_on_and_is_counted(self, pool: Pool) -> None:
        killer = pool.killer()
        try:
            for label in ("good", "other", "good"):
                assert pool.ask("worker", 1, "started", label) == b"go\n"
            assert pool.ask("worker", 1, "replayed", "good") == b"go\n"
            assert pool.ask("worker", 1, "relayed") == b"go\n"
        finally:
            killer.close()
        assert (killer.deliveries[OUTBOX], killer.deliveries[DIRECT], killer.replays) == (2, 1, 1)
        assert killer.messages == {OUTBOX: {"id-good"}, DIRECT: {"id-other"}}
        assert not killer.kills

    @pytest.mark.parametrize(
        ("strike", "place"),
        [
            (Strike.CHILD_AT_START, "started"),
            (Strike.CHILD_AT_WORK, "at_work"),
            (Strike.CHILD_AT_ACK, "ended"),
        ],
    )
    def test_a_child_dies_once_at_its_place(self, pool: Pool, strike: Strike, place: str) -> None:
        killer, child = pool.killer(strike), pool.child()
        try:
            for earlier in ["started", "at_work", "ended"][: ["started", "at_work", "ended"].index(place)]:
                assert pool.ask("worker", child.pid, earlier, "good") == b"go\n"
            assert pool.ask("worker", child.pid, place, "good") == b""
            assert child.wait(PATIENCE) == -signal.SIGKILL
            assert pool.ask("worker", 1, place, "good") == b"go\n"
        finally:
            killer.close()
        assert killer.kills == {Kill.CHILD: 1}

    def test_relays_die_with_the_first_message_and_with_a_later_one(self, pool: Pool) -> None:
        killer = pool.killer()
        try:
            answers = [pool.ask("relay", 1, "relayed") for _ in range(20)]
        finally:
            killer.close()
        assert [number for number, answer in enumerate(answers, 1) if not answer] == sorted(RELAY_DIES_AT)
        assert pool.done == ["kill relay", "start relay"] * 2
        assert killer.kills == {Kill.RELAY: 2}

    def test_a_worker_dies_with_its_children(self, pool: Pool, quick: None) -> None:
        killer = pool.killer(Strike.WORKER)
        try:
            assert pool.ask("worker", 1, "ended", "good") == b""
            assert pool.ask("worker", 1, "ended", "good") == b"go\n"
        finally:
            killer.close()
        assert pool.done == ["kill worker", "start worker"]
        assert killer.kills == {Kill.WORKER: 1}

    def test_a_child_that_waited_while_its_worker_was_killed_is_dead_too(
        self, pool: Pool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("testproject.demo.killer.HOLD", PATIENCE)  # until the other has come
        killer, other = pool.killer(Strike.WORKER), pool.connect()
        first = pool.connect()
        try:
            first.sendall(b"worker 1 ended testproject.tasks.send_receipt good id-good\n")
            assert eventually(killer._deciding.locked)
            assert pool.ask("worker", 2, "started", "good", connection=other) == b""
            assert first.recv(10) == b""
        finally:
            killer.close()
        assert killer.deliveries[OUTBOX] == 0

    def test_a_broker_comes_back_and_who_was_held_goes_on(self, pool: Pool, quick: None) -> None:
        killer = pool.killer(Strike.BROKER)
        try:
            assert pool.ask("worker", 1, "ended", "good") == b"go\n"
        finally:
            killer.close()
        assert pool.done == ["kill broker", "start broker"]
        assert killer.kills == {Kill.BROKER: 1}

    def test_what_does_not_come_back_is_reported(self, pool: Pool, quick: None) -> None:
        def fail() -> None:
            raise ProcessError("no luck")

        pool.daemons[2].start = fail
        killer = pool.killer(Strike.BROKER)
        try:
            assert pool.ask("worker", 1, "ended", "good") == b""
        finally:
            killer.close()
        assert killer.error == "no luck"

    def test_nobody_is_killed_when_it_rests(self, pool: Pool) -> None:
        killer = pool.killer(Strike.CHILD_AT_ACK)
        killer.rest()
        try:
            assert pool.ask("worker", 1, "ended", "good") == b"go\n"
            assert pool.ask("relay", 1, "relayed") == b"go\n"
        finally:
            killer.close()
        assert not killer.kills
