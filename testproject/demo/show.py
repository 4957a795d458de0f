"""The three acts, one after the other on one server, and what is found of each when it is over."""

from __future__ import annotations

import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from django.core.management import call_command
from django.db import connection

from testproject.harness.processes import Daemon, answers
from testproject.harness.redis import Redis
from testproject.harness.strikes import Marks
from testproject.management.commands.create_demo_users import create_demo_users
from testproject.provider.client import counts as provider_counts

from .acts import ACTS, CHARGES, ORDERS, PAYOUTS, Act, Side
from .books import Books, database_name, published
from .client import Endpoint
from .hop import Hop, running_hop
from .life import STORMY
from .plan import Charge, Plan
from .report import Report
from .seen import Tally
from .storm import Storm
from .verdict import Findings, complaints, judge, judge_messages

LOOK_EVERY = 0.1  # seconds
PATIENCE_WITH_PROVIDER = 15.0
HEALTH = b"GET /health/ HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"

#: Fewer payouts and orders than charges at once, and no worker dies but for one of them. Otherwise a killed worker
#: would take most of them with it before they called the provider, and there would be little to find there.
CALMER = 3


class Show:
    def __init__(
        self,
        plan: Plan,
        report: Report,
        providers: Mapping[bool, str],
        ledgers: Mapping[bool, Path],
        marks: Marks,
        redis: Redis | None,
    ) -> None:
        self.plan = plan
        self.report = report
        self.books = Books(f"demo-{secrets.token_hex(4)}", ledgers)
        self.tally = Tally(marks)
        #: Why it ended before its time.
        self.crashed: list[str] = []
        self._providers = providers
        self._marks = marks
        self._redis = redis
        self._storms: dict[Act, Storm] = {}
        self._seconds: dict[Act, float] = {}
        self._kills: dict[Act, int] = {}
        self._hop: Hop | None = None

    def run(self, directory: Path, without_hop: str, should_end: Callable[[], bool]) -> int:
        """Play all acts, judge them, and return the exit code.

        :param without_hop: why there is no broker.
        :param should_end: looked at a few times a second.
        """
        self.report.introduce(without_hop)
        call_command("migrate", verbosity=0, interactive=False)
        tokens = create_demo_users()
        with serving(self.plan, directory) as (server, port):
            self.report.started(database_name(), port)
            for act in ACTS:
                if not self.crashed and (act is not ORDERS or self._redis is not None):
                    self._play(act, server, port, tokens, should_end)
            deduplicated = provider_counts(self._providers[True], timeout=PATIENCE_WITH_PROVIDER)["deduplicated"]
        for storm in self._storms.values():
            storm.join()
        # The server has ended, so nothing is under way any more and what is counted stays.
        findings = {act.noun: self._judge(act, deduplicated) for act in self._storms}
        if self._redis is None:
            self.report.no_hop(without_hop)
        problems = [*self.crashed]
        for act in self._storms:
            problems += complaints(act, findings[act.noun])
        if problems:
            self.report.failed(problems, findings)
            return 1
        self.report.passed(findings, self._marks.count("died.*"))
        return 0

    def _play(
        self, act: Act, server: Daemon, port: int, tokens: dict[str, str], should_end: Callable[[], bool]
    ) -> None:
        """Let the storm of an act rage to its end, and what it has set off behind the server to its own."""
        plan = self.plan
        if act is not CHARGES:
            plan = replace(plan, concurrency=max(1, plan.concurrency // CALMER))
        drawn = {side: act.draw(plan, side, self.books.run) for side in act.sides}
        storm = Storm(plan, [(Endpoint(side, port, tokens), charges) for side, charges in drawn.items()], self.tally)
        self._storms[act] = storm
        started, kills = time.monotonic(), self._marks.count("died.*")
        behind = nullcontext() if act is not ORDERS else self._behind(drawn)
        with (
            stormy(self._marks) if act is CHARGES else nullcontext(),
            behind as hop,
            storm.running(),
            self.report.progress(
                act,
                len(drawn[act.sides[0]]),
                self.books,
                self.tally,
                lambda: self._marks.count("died.*") - kills + (0 if hop is None else sum(hop.kills().values())),
            ) as update,
        ):
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
        self._seconds[act] = time.monotonic() - started
        self._kills[act] = self._marks.count("died.*") - kills

    @contextmanager
    def _behind(self, drawn: Mapping[Side, list[Charge]]) -> Iterator[Hop]:
        assert self._redis is not None
        with running_hop(self._redis, self._marks, self.plan, self.books.run, drawn) as self._hop:
            yield self._hop

    def _judge(self, act: Act, deduplicated: int) -> dict[str, Findings]:
        """What was found on all sides, now shown in a table."""
        found: dict[str, Findings] = {}
        for side in act.sides:
            histories, effects = self._storms[act].histories[side.name], self.books.effects(act, side)
            findings = judge(act, side, histories, effects)
            if act is ORDERS:
                findings = judge_messages(findings, histories, self.books.messages(side))
                findings.figures.update(self._hops(side))
            elif act is PAYOUTS:
                findings.figures.update(
                    rows=self.books.own_rows(side),
                    reconciled=len(self._marks.notes("reconciled")),
                    deduplicated=deduplicated,
                )
            findings.figures.update(self.tally.of(side.name))
            findings.figures.update(
                kills=self._kills[act],
                take_overs=self.books.take_overs(side),
                one_writer=int(connection.vendor == "sqlite"),
            )
            found[side.name] = findings
        self.report.table(act, found, self._seconds[act])
        if act is PAYOUTS:
            side = next(side for side in act.sides if side.may_park)
            self.report.parked(found[side.name].parked, self.books.effects(act, side))
        return found

    def _hops(self, side: Side) -> dict[str, int]:
        """What was seen behind the server."""
        assert self._hop is not None
        of_side = f".{self.books.run}.{side.name}-"
        deliveries = [note for note in self._marks.notes("deliveries") if of_side in note]
        sent = {note.rpartition(":")[2] for note in deliveries}
        return {
            "messages": len(sent) if side.control else published(self.books.run).count(),
            "deliveries": len(deliveries),
            "replays": sum(of_side in note for note in self._marks.notes("replays")),
            "resent": self._hop.resent,
            "ended": self._hop.ended,
            **self._hop.kills(),
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


@contextmanager
def stormy(marks: Marks) -> Iterator[None]:
    """Workers of the server die at random for as long as the block."""
    marks.leave(STORMY)
    try:
        yield
    finally:
        (marks.directory / STORMY).unlink()
