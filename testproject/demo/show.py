"""Runs the storms one after the other, each on its own server, and prints the findings."""

import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from django.core.management import call_command
from rich.console import Console
from rich.table import Table

from idempotency.models import IdempotencyRecord
from testproject.harness.marks import Marks
from testproject.harness.processes import Daemon, ProcessError, answers, free_port
from testproject.harness.redis import Redis
from testproject.management.commands.create_demo_users import create_demo_users
from testproject.models import Charge as ChargeRow
from testproject.models import Receipt, UnprotectedCharge, UnprotectedReceipt
from testproject.provider.process import Provider

from .charges import Charge
from .client import Endpoint, History, storm
from .hop import Hop
from .verdict import ROWS, complaints, judge

HEALTH = b"GET /health/ HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
WORKERS = 4
#: Fewer concurrent orders than charges. Otherwise a killed worker would end most of them before they published
#: anything.
AT_ONCE = {"charges": 48, "payments": 24, "orders": 16}
TIME_LIMIT = 300.0  # seconds after which a storm that is not over has failed
LINE_EVERY = 3.0  # seconds between two lines of progress


class Show:
    """Runs the storms, and collects their problems and summaries."""

    def __init__(self, console: Console, marks: Marks, directory: Path, provider: Provider) -> None:
        self.console, self.marks, self.directory, self.provider = console, marks, directory, provider
        call_command("migrate", verbosity=0, interactive=False)
        self.tokens = create_demo_users()
        self.run = f"demo-{secrets.token_hex(4)}"  # a database can be used again
        self.problems: list[str] = []
        self.summary: list[str] = []

    def play(self, noun: str, count: int, redis: Redis | None = None) -> None:
        """Run a storm and judge it. With ``redis`` it sends orders, and their messages must arrive."""
        started, before, stop = time.monotonic(), self.marks.count("died.*"), threading.Event()
        hop: Hop | None = None
        with ExitStack() as stack:
            server, port = stack.enter_context(self._serving())
            self.console.print(f"[dim]{WORKERS} gunicorn workers serve 127.0.0.1:{port}.[/dim]")
            # No keep-alive: see ``server``.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            http = stack.enter_context(httpx.Client(limits=limits, trust_env=False))
            endpoints = []
            for name, path in (("protected", ""), ("unprotected", "unprotected/")):
                charges = [
                    Charge(number, f"{self._prefix(noun, name)}{number}", bool(redis)) for number in range(count)
                ]
                url, histories = f"http://127.0.0.1:{port}/{path}{noun}/", [History(charge) for charge in charges]
                endpoints.append(Endpoint(name, url, self.tokens, stop, http, histories))
            if redis is not None:
                expected = sum(not history.charge.declined for history in endpoints[0].histories)
                hop = Hop(redis, self._prefix(noun, "protected"), expected)
                for daemon in hop.daemons:
                    stack.callback(daemon.stop)
            futures = stack.enter_context(storm(endpoints, stop, AT_ONCE[noun]))
            self._wait(futures, endpoints, hop, server, noun)
        # The server has stopped, so nothing is in flight and the counts are final.
        figures = Counter(kills=self.marks.count("died.*") - before) + (hop.figures if hop else Counter())
        self._judge(noun, endpoints, figures, time.monotonic() - started)

    def _prefix(self, noun: str, name: str) -> str:
        """The prefix of the keys and labels at an endpoint."""
        return f"{self.run}.{noun}.{name}-"

    def _wait(
        self, futures: list[Future[None]], endpoints: list[Endpoint], hop: Hop | None, server: Daemon, noun: str
    ) -> None:
        started, lines, over = time.monotonic(), 0, False
        while not over:
            done, waiting = wait(futures, timeout=0.1)
            for future in done:
                future.result()
            over = (hop is None or hop.is_over()) and not waiting
            seconds = time.monotonic() - started
            if seconds > LINE_EVERY * (lines + 1):
                lines += 1
                progress = "; ".join(self._progress(noun, endpoint) for endpoint in endpoints)
                self.console.print(f"{seconds:4.0f} s  {progress}", soft_wrap=True)
            if not server.alive or seconds > TIME_LIMIT:
                logs = [f"\n{daemon.log_tail()}" for daemon in (server, *(hop.daemons if hop else ()))]
                raise ProcessError(f"The storm did not end. The logs end with:{''.join(logs)}")

    def _progress(self, noun: str, endpoint: Endpoint) -> str:
        """How many charges or orders have taken effect, and the number of effects."""
        charges, receipts = self._effects(noun, endpoint.name)
        effects = receipts if noun == "orders" else Counter({label: len(ids) for label, ids in charges.items()})
        expected = [history.charge.label for history in endpoint.histories if not history.charge.declined]
        done = sum(label in effects for label in expected)
        return f"{endpoint.name}: {done:,} of {len(expected):,} {noun}, {effects.total():,} effects"

    def _judge(self, noun: str, endpoints: list[Endpoint], figures: Counter[str], seconds: float) -> None:
        found = {}
        for endpoint in endpoints:
            name, what = endpoint.name, "messages" if noun == "orders" else noun
            charges, receipts = self._effects(noun, name)
            found[name] = judge(endpoint.histories, charges, receipts if noun == "orders" else None)
            of = found[name].figures
            of.update(endpoint.figures + figures)
            # How often a claim was taken over from a dead worker.
            records = IdempotencyRecord.objects.filter(idempotency_key__startswith=self._prefix(noun, name))
            of["charged"] = self.provider.payouts(self._prefix(noun, name)[:-1]).total()
            of["take_overs"] = sum(attempt - 1 for attempt in records.values_list("attempt", flat=True))
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
                table.add_section()  # separates the verdict from the description of the storm
            table.add_row(row.label, *(f"{one.figures[row.figure]:,}" for one in found.values()))
        self.console.print()
        self.console.print(table)
        self.problems += complaints(rows, **found)
        if self.problems:
            self.problems += found["protected"].examples

    def _effects(self, noun: str, name: str) -> tuple[dict[str, list[int]], Counter[str]]:
        """The charges' ids and the number of receipts by label, unexpected ones included."""
        models = (ChargeRow, Receipt) if name == "protected" else (UnprotectedCharge, UnprotectedReceipt)
        of_charges, of_receipts = (
            model._default_manager.filter(label__startswith=self._prefix(noun, name)) for model in models
        )
        charges: dict[str, list[int]] = {}
        for label, pk in of_charges.values_list("label", "pk"):
            charges.setdefault(label, []).append(pk)
        return charges, Counter(of_receipts.values_list("label", flat=True))

    @contextmanager
    def _serving(self) -> Iterator[tuple[Daemon, int]]:
        """Serve the sample project, with the demo's faults, on a free port of 127.0.0.1."""
        port = free_port()
        command = [sys.executable, "-m", "gunicorn", "--config", "python:testproject.demo.server"]
        command += ["--workers", str(WORKERS), "--bind", f"127.0.0.1:{port}", "testproject.demo.server:application"]
        with Daemon(
            "server", command, self.directory, is_ready=lambda: answers(("127.0.0.1", port), HEALTH, b"HTTP/1.1 ")
        ) as server:
            yield server, port
