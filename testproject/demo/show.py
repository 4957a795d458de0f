"""The three acts, one after the other on one server, and what is found of each when it is over."""

from __future__ import annotations

import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from django.core.management import call_command
from django.db import connection

from testproject.harness.processes import Daemon, answers
from testproject.harness.redis import Redis
from testproject.harness.strikes import Marks
from testproject.management.commands.create_demo_users import create_demo_users
from testproject.provider import Provider
from testproject.provider.client import counts as provider_counts

from .acts import ACTS, CHARGES, ORDERS, PAYOUTS, Act, Side
from .books import Books, database_name
from .client import Endpoint, Tally
from .hop import Hop, running_hop
from .life import stormy
from .plan import Plan
from .report import Report
from .storm import Storm
from .verdict import Findings, complaints, judge, judge_messages

LOOK_EVERY = 0.1  # seconds
PATIENCE_WITH_PROVIDER = 15.0
HEALTH = b"GET /health/ HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"

#: Fewer payouts and orders than charges at once, and no worker dies but for one of them. Otherwise a killed worker
#: would take most of them with it before they called the provider, and there would be little to find there.
CALMER = 3


@dataclass
class Played:
    """An act that is over. ``kills`` are those of the server's workers."""

    storm: Storm
    seconds: float
    kills: int
    hop: Hop | None


@dataclass
class Show:
    plan: Plan
    report: Report
    marks: Marks
    #: The one that deduplicates (True), and the one that never does.
    providers: Mapping[bool, Provider]
    redis: Redis | None

    def __post_init__(self) -> None:
        self.books = Books(f"demo-{secrets.token_hex(4)}", self.providers)
        self.tally = Tally(self.marks)
        #: Why it ended before its time.
        self.crashed: list[str] = []

    def run(self, directory: Path, without_hop: str, should_end: Callable[[], bool]) -> int:
        """Play all acts, judge them, and return the exit code.

        :param without_hop: why there is no broker.
        :param should_end: looked at a few times a second.
        """
        self.report.introduce(without_hop)
        call_command("migrate", verbosity=0, interactive=False)
        tokens = create_demo_users()
        played: dict[Act, Played] = {}
        with serving(self.plan, directory) as (server, port):
            self.report.started(database_name(), port)
            for act in ACTS:
                if not self.crashed and (act is not ORDERS or self.redis is not None):
                    endpoints = [Endpoint(side, port, tokens) for side in act.sides]
                    played[act] = self._play(act, server, endpoints, should_end)
            deduplicated = provider_counts(self.providers[True].url, timeout=PATIENCE_WITH_PROVIDER)["deduplicated"]
        for over in played.values():
            over.storm.join()
        # The server has ended, so nothing is under way any more and what is counted stays.
        findings = {act: self._judge(act, over, deduplicated) for act, over in played.items()}
        self.report.no_hop(without_hop)
        if problems := [*self.crashed, *(words for act, found in findings.items() for words in complaints(act, found))]:
            self.report.failed(problems, findings)
            return 1
        self.report.passed(findings, self.marks.count("died.*"))
        return 0

    def _play(self, act: Act, server: Daemon, endpoints: list[Endpoint], should_end: Callable[[], bool]) -> Played:
        """Let the storm of an act rage to its end, and what it has set off behind the server to its own."""
        plan, hop = self.plan, None
        if act is not CHARGES:
            plan = replace(plan, concurrency=max(1, plan.concurrency // CALMER))
        drawn = {endpoint.side: act.draw(plan, endpoint.side, self.books.run) for endpoint in endpoints}
        storm = Storm(plan, list(zip(endpoints, drawn.values(), strict=True)), self.tally)
        started, before = time.monotonic(), self.marks.count("died.*")

        def kills() -> int:
            return self.marks.count("died.*") - before

        with ExitStack() as stack:
            if act is CHARGES:
                stack.enter_context(stormy(self.marks))
            if act is ORDERS and self.redis is not None:
                hop = stack.enter_context(running_hop(self.redis, self.marks, plan, self.books, drawn))
            stack.enter_context(storm.running())
            update = stack.enter_context(
                self.report.progress(
                    act, self.books, self.tally, lambda: kills() + (0 if hop is None else sum(hop.kills().values()))
                )
            )
            while not storm.wait(LOOK_EVERY) or (hop is not None and not hop.is_over()):
                update()
                if should_end():
                    raise KeyboardInterrupt
                self.crashed = [] if hop is None else hop.what_stopped()
                if not server.alive:
                    self.crashed.append("The server ended by itself.")
                if time.monotonic() - started > plan.time_limit:
                    self.crashed.append(f"The storm was not over after {plan.time_limit:.0f} s.")
                if self.crashed:
                    self.crashed.append(f"The server's log ends with:\n{server.log_tail()}")
                    break
        return Played(storm, time.monotonic() - started, kills(), hop)

    def _judge(self, act: Act, played: Played, deduplicated: int) -> dict[str, Findings]:
        """What was found on all sides, now shown in a table."""
        found: dict[str, Findings] = {}
        for side in act.sides:
            histories, effects = played.storm.histories[side.name], self.books.effects(act, side)
            findings = judge(act, side, histories, effects)
            if played.hop is not None:
                findings = judge_messages(findings, histories, self.books.messages(side))
                findings.figures.update(self._hops(side, played.hop))
            findings.figures.update(self.tally.of(side.name))
            findings.figures.update(
                rows=self.books.own_rows(side),
                reconciled=len(self.marks.notes("reconciled")),
                deduplicated=deduplicated,
                kills=played.kills,
                take_overs=self.books.take_overs(side),
                one_writer=int(connection.vendor == "sqlite"),
            )
            found[side.name] = findings
        self.report.table(act, found, played.seconds)
        if act is PAYOUTS:
            side = next(side for side in act.sides if side.may_park)
            self.report.parked(found[side.name].parked, self.books.effects(act, side))
        return found

    def _hops(self, side: Side, hop: Hop) -> dict[str, int]:
        """What was seen behind the server."""
        of_side = f".{self.books.run}.{side.name}-"
        deliveries = [note for note in self.marks.notes("deliveries") if of_side in note]
        sent = {note.rpartition(":")[2] for note in deliveries}
        return {
            "messages": len(sent) if side.control else self.books.published().count(),
            "deliveries": len(deliveries),
            "replays": sum(of_side in note for note in self.marks.notes("replays")),
            "resent": hop.resent,
            "ended": hop.ended,
            **hop.kills(),
        }


@contextmanager
def serving(plan: Plan, directory: Path) -> Iterator[tuple[Daemon, int]]:
    """Run the sample project, with the demo's faults, on a free port of 127.0.0.1, and yield that.

    :raises ProcessError: it did not start.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        port: int = listener.getsockname()[1]
        command = [sys.executable, "-m", "gunicorn", "--config", "python:testproject.demo.server"]
        command += ["--workers", str(plan.workers), "--bind", f"fd://{listener.fileno()}"]
        server = Daemon(
            "server",
            [*command, "testproject.demo.server:application"],
            directory,
            is_ready=lambda: answers(("127.0.0.1", port), HEALTH, b"HTTP/1.1 "),
            pass_fds=[listener.fileno()],
        )
        with server:
            listener.close()  # only gunicorn holds it from here: if it dies, clients are refused
            yield server, port
