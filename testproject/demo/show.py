"""The storms, one after the other, each on a server of its own, and what is found of each when it is over."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from django.core.management import call_command
from rich.console import Console
from rich.table import Table

from idempotency.models import IdempotencyRecord
from testproject.harness.marks import Marks
from testproject.harness.processes import Daemon, ProcessError, answers
from testproject.harness.redis import Redis
from testproject.management.commands.create_demo_users import create_demo_users
from testproject.models import Charge as ChargeRow
from testproject.models import Receipt, UnprotectedCharge, UnprotectedReceipt

from .charges import Charge
from .client import Endpoint
from .hop import Hop
from .storm import Storm
from .verdict import ROWS, History, complaints, judge

HEALTH = b"GET /health/ HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
WORKERS = 4
#: Fewer orders than charges are under way at once. Otherwise a killed worker would take most of them with it before
#: they published anything.
AT_ONCE = {"charges": 48, "orders": 16}
TIME_LIMIT = 300.0  # seconds after which a storm that is not over has failed
LINE_EVERY = 3.0  # seconds between two lines of progress
OWNER = os.getppid()


class Show:
    """The storms, one after the other, and what was found of each."""

    def __init__(self, console: Console, marks: Marks, directory: Path) -> None:
        self.console, self.marks, self.directory = console, marks, directory
        call_command("migrate", verbosity=0, interactive=False)
        self.tokens = create_demo_users()
        self.run = f"demo-{secrets.token_hex(4)}"  # a database can be used again
        self.problems: list[str] = []
        self.summary: list[str] = []

    def play(self, noun: str, count: int, redis: Redis | None = None) -> None:
        """Let a storm rage to its end, and judge it. With ``redis`` it is of orders, and their messages must arrive."""
        started, before, stop = time.monotonic(), self.marks.count("died.*"), threading.Event()
        with ExitStack() as stack:
            server, port = stack.enter_context(self._serving())
            self.console.print(f"[dim]{WORKERS} gunicorn workers serve 127.0.0.1:{port}.[/dim]")
            # No kept connections: see ``server``.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            wire = stack.enter_context(httpx.HTTPTransport(limits=limits))
            courses = {}
            for name, path in (("protected", ""), ("unprotected", "unprotected/")):
                endpoint = Endpoint(name, f"http://127.0.0.1:{port}/{path}{noun}/", self.tokens, stop, wire)
                labels = [f"{self._begins(noun, name)}{number}" for number in range(count)]
                courses[name] = endpoint, [Charge(*each, redis is not None) for each in enumerate(labels)]
            hop: Hop | None = None
            if redis is not None:
                expected = sum(not charge.declined for charge in courses["protected"][1])
                hop = Hop(redis, self._begins(noun, "protected"), expected)
                for daemon in hop.daemons:
                    stack.callback(daemon.stop)
            storm = Storm(courses)
            stack.enter_context(storm.running(stop, AT_ONCE[noun]))
            self._wait(storm, hop, server, noun)
        # The server has ended, so nothing is under way any more and what is counted stays.
        figures = Counter(kills=self.marks.count("died.*") - before) + (hop.figures if hop else Counter())
        seen = {name: endpoint.seen for name, (endpoint, _) in courses.items()}
        self._judge(noun, storm, seen, figures, time.monotonic() - started)

    def _begins(self, noun: str, name: str) -> str:
        """The beginning of the keys and labels at an endpoint, and of no others."""
        return f"{self.run}.{noun}.{name}-"

    def _wait(self, storm: Storm, hop: Hop | None, server: Daemon, noun: str) -> None:
        started, lines, over = time.monotonic(), 0, False
        while not over:
            if os.getppid() != OWNER:  # it was killed, and the database with it
                raise KeyboardInterrupt
            over = storm.wait(0.1)
            if hop is not None:
                over = hop.is_over() and over
            seconds = time.monotonic() - started
            if seconds > LINE_EVERY * (lines + 1):
                lines += 1
                progress = "; ".join(self._progress(noun, *course) for course in storm.histories.items())
                self.console.print(f"{seconds:4.0f} s  {progress}", soft_wrap=True)
            if not server.alive or seconds > TIME_LIMIT:
                logs = [f"\n{daemon.log_tail()}" for daemon in (server, *(hop.daemons if hop else ()))]
                raise ProcessError(f"The storm did not end. The logs end with:{''.join(logs)}")

    def _progress(self, noun: str, name: str, histories: Sequence[History]) -> str:
        """How many charges or orders have taken effect, and with how many effects."""
        charges, receipts = effects_in_the_database(self._begins(noun, name), protected=name == "protected")
        effects = receipts if noun == "orders" else Counter({label: len(ids) for label, ids in charges.items()})
        expected = [history.charge.label for history in histories if not history.charge.declined]
        done = sum(label in effects for label in expected)
        return f"{name}: {done:,} of {len(expected):,} {noun}, {effects.total():,} effects"

    def _judge(
        self, noun: str, storm: Storm, seen: dict[str, Counter[str]], figures: Counter[str], seconds: float
    ) -> None:
        found = {}
        for name, histories in storm.histories.items():
            begins = self._begins(noun, name)
            charges, receipts = effects_in_the_database(begins, protected=name == "protected")
            found[name] = judge(histories, charges, receipts if noun == "orders" else None)
            found[name].figures.update(seen[name] + figures)
            found[name].figures["take_overs"] = take_overs(begins)
            of, what = found[name].figures, "messages" if noun == "orders" else noun
            self.summary.append(
                f"{name}: {of['expected']:,} {what}, {of['effects']:,} effects, {of['doubled']:,} doubled, "
                f"{of['lost']:,} lost, {of['wrong']:,} wrong answers."
            )
        rows = [row for row in ROWS if noun in row.storms]
        table = Table(title=f"{seconds:.0f} seconds of {noun}", title_justify="left")
        for heading in ("", *found):
            table.add_column(heading, justify="right" if heading else "left")
        for row in rows:
            if row.figure == "requests":
                table.add_section()  # above it the judgement, below it what the storm was
            table.add_row(row.label, *(f"{one.figures[row.figure]:,}" for one in found.values()))
        self.console.print()
        self.console.print(table)
        self.problems += complaints(rows, **found)
        if self.problems:
            self.problems += found["protected"].examples

    @contextmanager
    def _serving(self) -> Iterator[tuple[Daemon, int]]:
        """Run the sample project, with the demo's faults, on a free port of 127.0.0.1, and yield that.

        :raises ProcessError: it did not start.
        """
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            port: int = listener.getsockname()[1]
            command = [sys.executable, "-m", "gunicorn", "--config", "python:testproject.demo.server"]
            command += ["--workers", str(WORKERS), "--bind", f"fd://{listener.fileno()}"]
            server = Daemon(
                "server",
                [*command, "testproject.demo.server:application"],
                self.directory,
                is_ready=lambda: answers(("127.0.0.1", port), HEALTH, b"HTTP/1.1 "),
                pass_fds=[listener.fileno()],
            )
            with server:
                listener.close()  # only gunicorn holds it from here: if it dies, clients are refused
                yield server, port


def effects_in_the_database(begins: str, *, protected: bool) -> tuple[dict[str, list[int]], Counter[str]]:
    """The ids of the charges, and the number of receipts, by their labels. Unplanned ones are included."""
    charges: dict[str, list[int]] = {}
    of_charges, of_receipts = (ChargeRow, Receipt) if protected else (UnprotectedCharge, UnprotectedReceipt)
    for label, pk in of_charges._default_manager.filter(label__startswith=begins).values_list("label", "pk"):
        charges.setdefault(label, []).append(pk)
    receipts = of_receipts._default_manager.filter(label__startswith=begins).values_list("label", flat=True)
    return charges, Counter(receipts)


def take_overs(begins: str) -> int:
    """How often a claim changed hands, because its worker had died."""
    records = IdempotencyRecord.objects.filter(idempotency_key__startswith=begins)
    return sum(attempt - 1 for attempt in records.values_list("attempt", flat=True))
