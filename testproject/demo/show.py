"""The storms, one after the other, each on a server of its own, and what is found of each when it is over."""

from __future__ import annotations

import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
from django.core.management import call_command
from rich.console import Console
from rich.table import Table

from idempotency.models import IdempotencyRecord
from testproject.harness.processes import Daemon, answers
from testproject.harness.redis import Redis
from testproject.harness.strikes import Marks
from testproject.management.commands.create_demo_users import create_demo_users
from testproject.models import Charge, Receipt, UnprotectedCharge, UnprotectedReceipt

from .client import Endpoint
from .hop import STRIKES, UNPROTECTED_STRIKES, Hop, running_hop, strikes_of
from .plan import Plan, draw
from .storm import Storm
from .verdict import CHARGES, ORDERS, complaints, judge

HEALTH = b"GET /health/ HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
#: Fewer orders than charges are under way at once, and a worker dies only for one of them. Otherwise a killed worker
#: would take most of them with it before they published anything.
CALMER = 3
LOOK_EVERY = 0.1  # seconds
LINE_EVERY = 3.0  # seconds between two lines where nothing can move


class Show:
    """The storms, one after the other, and what was found of each."""

    def __init__(
        self, plan: Plan, console: Console, marks: Marks, directory: Path, should_end: Callable[[], bool]
    ) -> None:
        """:param should_end: looked at a few times a second."""
        self.plan, self.console, self.marks, self.directory = plan, console, marks, directory
        self.should_end = should_end
        call_command("migrate", verbosity=0, interactive=False)
        self.tokens = create_demo_users()
        self.run = f"demo-{secrets.token_hex(4)}"  # a database can be used again
        self.problems: list[str] = []
        self.examples: list[str] = []
        self.summary: list[str] = []

    def play(self, noun: str, redis: Redis | None = None) -> None:
        """Let a storm rage to its end, and judge it. With ``redis`` it is of orders, and their messages must arrive."""
        plan = self.plan if redis is None else replace(self.plan, concurrency=-(-self.plan.concurrency // CALMER))
        started, before, stop = time.monotonic(), self.marks.count("died.*"), threading.Event()
        hop: Hop | None = None
        with ExitStack() as stack:
            server, port = stack.enter_context(self._serving(plan.kill_every if redis is None else 0.0))
            self.console.print(f"[dim]{plan.workers} gunicorn workers serve 127.0.0.1:{port}, seed {plan.seed}.[/dim]")
            # No kept connections: see ``server``. Bursts add threads of their own.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            wire = stack.enter_context(httpx.HTTPTransport(limits=limits))
            courses = [
                (
                    Endpoint(name, f"http://127.0.0.1:{port}/{path}{noun}/", self.tokens, plan, stop, wire),
                    draw(plan, self._begins(noun, name), orders=redis is not None),
                )
                for name, path in (("protected", ""), ("unprotected", "unprotected/"))
            ]
            if redis is not None:
                strikes = strikes_of(courses[0][1], STRIKES) + strikes_of(courses[1][1], UNPROTECTED_STRIKES)
                hop = stack.enter_context(running_hop(redis, self.marks, strikes, self._begins(noun, "protected")))
            storm = Storm(plan, courses)
            stack.enter_context(storm.running(stop))
            self._wait(storm, hop, server, [endpoint for endpoint, _ in courses], noun, started)
        # The server has ended, so nothing is under way any more and what is counted stays.
        if not self.problems:
            figures = {"kills": self.marks.count("died.*") - before}
            if hop is not None:
                figures |= {"resent": hop.resent, **hop.kills()}
            self._judge(noun, storm, {endpoint.name: endpoint.seen for endpoint, _ in courses}, figures, started)

    def _begins(self, noun: str, name: str) -> str:
        """The beginning of the keys and labels at an endpoint, and of no others."""
        return f"{self.run}.{noun}.{name}-"

    def _wait(
        self, storm: Storm, hop: Hop | None, server: Daemon, endpoints: list[Endpoint], noun: str, started: float
    ) -> None:
        said = started
        with self.console.status(noun) as status:
            while not storm.wait(LOOK_EVERY) or (hop is not None and not hop.is_over()):
                if self.should_end():
                    raise KeyboardInterrupt
                seen = [
                    f"{one.name}: {one.seen['done']:,} settled, {one.seen['requests']:,} requests" for one in endpoints
                ]
                line = f"{time.monotonic() - started:4.0f} s  {noun}  {'; '.join(seen)}"
                status.update(line)
                if not self.console.is_terminal and time.monotonic() - said >= LINE_EVERY:
                    said = time.monotonic()
                    self.console.print(line, soft_wrap=True)
                self.problems = [] if hop is None else hop.what_stopped()
                if not server.alive:
                    self.problems.append("The server ended by itself.")
                if time.monotonic() - started > self.plan.time_limit:
                    self.problems.append(f"The storm was not over after {self.plan.time_limit} s.")
                if self.problems:
                    self.problems.append(f"The server's log ends with:\n{server.log_tail()}")
                    return

    def _judge(
        self, noun: str, storm: Storm, seen: dict[str, Counter[str]], figures: dict[str, int], started: float
    ) -> None:
        rows = CHARGES if noun == "charges" else ORDERS
        found = {}
        for name, histories in storm.histories.items():
            begins = self._begins(noun, name)
            charges, receipts = effects_in_the_database(begins, protected=name == "protected")
            found[name] = judge(histories, charges, None if noun == "charges" else receipts)
            found[name].figures.update(seen[name])
            found[name].figures.update(
                figures,
                take_overs=take_overs(begins),
                deliveries=sum(note.startswith(begins) for note in self.marks.notes("deliveries")),
                replays=sum(note.startswith(begins) for note in self.marks.notes("replays")),
            )
            of = found[name].figures
            what = "charges" if noun == "charges" else "messages"
            self.summary.append(
                f"{name}: {of['expected']:,} {what}, {of['effects']:,} effects, {of['doubled']:,} doubled, "
                f"{of['lost']:,} lost, {of['wrong']:,} wrong answers."
            )
        table = Table(title=f"{time.monotonic() - started:.0f} seconds of {noun}", title_justify="left")
        for heading in ("", *found):
            table.add_column(heading, justify="right" if heading else "left")
        for row in rows:
            table.add_row(row.label, *(f"{one.figures[row.figure]:,}" for one in found.values()))
        self.console.print()
        self.console.print(table)
        self.problems += complaints(noun, rows, **found)
        self.examples += [f"    {example}" for example in found["protected"].examples]

    @contextmanager
    def _serving(self, kill_every: float) -> Iterator[tuple[Daemon, int]]:
        """Run the sample project, with the demo's faults, on a free port of 127.0.0.1, and yield that.

        :raises ProcessError: it did not start.
        """
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            port: int = listener.getsockname()[1]
            command = [sys.executable, "-m", "gunicorn", "--config", "python:testproject.demo.server"]
            command += ["--workers", str(self.plan.workers), "--bind", f"fd://{listener.fileno()}"]
            server = Daemon(
                "server",
                [*command, "testproject.demo.server:application"],
                self.directory,
                environment={"DEMO_KILL_EVERY": str(kill_every)},
                is_ready=lambda: answers(("127.0.0.1", port), HEALTH, b"HTTP/1.1 "),
                pass_fds=[listener.fileno()],
            )
            with server:
                listener.close()  # only gunicorn holds it from here: if it dies, clients are refused
                yield server, port


def effects_in_the_database(begins: str, *, protected: bool) -> tuple[dict[str, list[int]], dict[str, int]]:
    """The ids of the charges, and the number of receipts, by their labels. Unplanned ones are included."""
    charges: dict[str, list[int]] = {}
    receipts: dict[str, int] = {}
    of_charges, of_receipts = (Charge, Receipt) if protected else (UnprotectedCharge, UnprotectedReceipt)
    for label, pk in of_charges._default_manager.filter(label__startswith=begins).values_list("label", "pk"):
        charges.setdefault(label, []).append(pk)
    for label in of_receipts._default_manager.filter(label__startswith=begins).values_list("label", flat=True):
        receipts[label] = receipts.get(label, 0) + 1
    return charges, receipts


def take_overs(begins: str) -> int:
    """How often a claim changed hands, because its worker had died."""
    records = IdempotencyRecord.objects.filter(idempotency_key__startswith=begins)
    return sum(attempt - 1 for attempt in records.values_list("attempt", flat=True))
