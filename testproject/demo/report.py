"""What the person at the terminal sees: what is going on, how far it is, the table, and the verdict in words.

On a terminal the figures move; elsewhere, as in a log, a line is printed now and then.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .orders import DIRECT, OUTBOX, Kill
from .orders import SIDES as ORDER_SIDES
from .payouts import CONTROL
from .payouts import SIDES as PAYOUT_SIDES
from .plan import Plan
from .tally import Seen, Tally
from .verdict import Effects, Findings, HopFindings

SIDES = ("protected", "unprotected")
KILLED = {
    Kill.RELAY: "SIGKILL: relays, between confirm and mark",
    Kill.CHILD: "SIGKILL: worker children, of both sides",
    Kill.WORKER: "SIGKILL: whole workers, of both sides",
    Kill.BROKER: "SIGKILL: brokers, of both sides",
}
MOST_LISTED = 40  # labels
LINE_EVERY = 3.0  # seconds between two lines where nothing can move


@dataclass(frozen=True)
class Stage:
    """One storm, as its progress is shown."""

    noun: str
    operations: int  # to be sent to each side
    effects: Mapping[str, Callable[[], int]]  # what counts them, by side
    where: str = "in the database"


@dataclass(frozen=True)
class HopSeen:
    """What was seen of the hop; lists have one entry a side."""

    findings: Mapping[str, HopFindings]
    tally: Tally
    messages: Sequence[int]
    deliveries: Sequence[int]
    replays: int
    kills: Mapping[Kill, int]
    seconds: float


class Report:
    def __init__(self, console: Console, plan: Plan) -> None:
        self.console = console
        self.plan = plan

    def introduce(self, without_hop: str = "") -> None:
        """Say what is to come. ``without_hop``: why there is no broker."""
        self.console.print(
            f"[bold]Sending {self.plan.operations:,} charges over a bad network to a server that is being killed.[/]\n"
            "Clients stop waiting, cut their connection or send duplicates at the same instant, and retry under one "
            "Idempotency-Key until they know the outcome, while worker processes die by SIGKILL. The same storm meets "
            "an endpoint without protection beside it. Effects are counted in the database.\n"
            f"Then {self.plan.payouts:,} payouts under each declaration of what a crash means, at a payment provider "
            "that fails or falls silent after it has paid. Effects are counted in the provider's own ledger."
        )
        if without_hop:
            self.console.print(f"The hop through a broker is left out. {without_hop}", markup=False)
            return
        self.console.print(
            f"At last {self.plan.orders:,} orders, each with two messages that go through the outbox, a relay, a real "
            "Redis and a Celery worker, all of them killed on the way; beside it plain tasks, sent by the handler. "
            "Effects are counted in the database and in the provider's ledger."
        )

    def started(self, database: str, port: int) -> None:
        self.console.print(
            f"[dim]{database} is up, {self.plan.workers} gunicorn workers serve 127.0.0.1:{port}, "
            f"the seed is {self.plan.seed}.[/dim]"
        )

    @contextmanager
    def progress(self, stage: Stage, tally: Tally, kills: Callable[[], int]) -> Iterator[Callable[[], None]]:
        """Yields what is to be called a few times a second while the storm goes on."""
        if self.console.is_terminal:
            with self._moving(stage, tally, kills) as update:
                yield update
        else:
            yield self._lines(stage, tally, kills)

    @contextmanager
    def _moving(self, stage: Stage, tally: Tally, kills: Callable[[], int]) -> Iterator[Callable[[], None]]:
        bars = Progress(
            TextColumn("{task.description:<11}"),
            BarColumn(40),
            MofNCompleteColumn(),
            TextColumn(f"{stage.noun} settled"),
            TimeElapsedColumn(),
            console=self.console,
        )
        tasks = {side: bars.add_task(side, total=stage.operations) for side in stage.effects}
        with Live(console=self.console, refresh_per_second=4, transient=True) as live:

            def update() -> None:
                counts = {side: tally.of(side) for side in stage.effects}
                for side, task in tasks.items():
                    bars.update(task, completed=counts[side][Seen.DONE])
                table = Table(box=None, pad_edge=False)
                table.add_column("so far", style="dim")
                for side in stage.effects:
                    table.add_column(side, justify="right", min_width=11)
                table.add_row("requests sent", *(f"{counts[side][Seen.ATTEMPT]:,}" for side in stage.effects))
                table.add_row(f"effects {stage.where}", *(f"{stage.effects[side]():,}" for side in stage.effects))
                table.add_row("replays", *(f"{counts[side][Seen.REPLAY]:,}" for side in stage.effects))
                table.add_row("answers never seen", *(f"{unseen(counts[side]):,}" for side in stage.effects))
                table.add_row("workers killed", f"{kills():,}")
                live.update(Group(bars, table), refresh=True)

            update()
            yield update

    def _lines(self, stage: Stage, tally: Tally, kills: Callable[[], int]) -> Callable[[], None]:
        started = last = time.monotonic()

        def update() -> None:
            nonlocal last
            if time.monotonic() - last < LINE_EVERY:
                return
            last = time.monotonic()
            counts = {side: tally.of(side) for side in stage.effects}
            sides = "; ".join(
                f"{side}: {counts[side][Seen.DONE]:,} {stage.noun} settled, {counts[side][Seen.ATTEMPT]:,} requests, "
                f"{stage.effects[side]():,} effects"
                for side in stage.effects
            )
            self.console.print(f"{last - started:4.0f} s  {sides}; {kills()} workers killed", soft_wrap=True)

        return update

    def table(
        self, findings: Mapping[str, Findings], tally: Tally, kills: int, take_overs: int, seconds: float
    ) -> None:
        """The figures of both sides beside each other."""
        counts = {side: tally.of(side) for side in SIDES}
        table = Table(title=f"{seconds:.0f} seconds of bad network", title_justify="left")
        table.add_column("")
        for side in SIDES:
            table.add_column(side, justify="right")

        row, seen = rows_of(table, [counts[side] for side in SIDES])
        found = [findings[side] for side in SIDES]
        row("logical charges", [side.operations for side in found])
        row("effects counted in the database", [side.effects for side in found], should_be=self.plan.operations)
        row("charged more than once", [side.doubled for side in found], should_be=0)
        row("acknowledged but lost", [side.lost for side in found], should_be=0)
        row("wrong answers", [side.wrong for side in found], should_be=0)
        row("outcome never learned", [side.unsettled for side in found], should_be=0, section=True)
        seen("HTTP requests sent", Seen.ATTEMPT)
        seen("cut by the client", Seen.CUT)
        seen("timed out", Seen.TIMEOUT)
        seen("broken off by the server's death", Seen.BROKEN, section=True)
        seen("replays of the recorded outcome", Seen.REPLAY)
        seen("conflicts, 409: another attempt at work", Seen.CONFLICT)
        seen("changed payloads rejected, 422", Seen.KEY_REUSED)
        seen("told to come back, 503", Seen.UNAVAILABLE)
        seen("other server errors, 5xx", Seen.ERROR, section=True)
        seen("charges whose worker was killed on purpose", Seen.KILLED_AT_WORK)
        seen("stalled workers that woke after a take-over", Seen.OUTLIVED)
        row("claims taken over from dead or stalled workers", [take_overs, 0])
        row("workers killed with SIGKILL, of both sides", [kills] * 2)
        self.console.print()
        self.console.print(table)

    def payout_table(
        self,
        findings: Mapping[str, Findings],
        rows: Mapping[str, int],
        tally: Tally,
        again: int,
        deduplicated: int,
        seconds: float,
    ) -> None:
        """The payouts under each declaration, and what was parked."""
        table = Table(title=f"{seconds:.0f} seconds of a provider that fails after it has paid", title_justify="left")
        table.add_column("")
        for side in PAYOUT_SIDES:
            table.add_column(side.title, justify="right")
        row, seen = rows_of(table, [tally.of(side.name) for side in PAYOUT_SIDES])
        found = [findings[side.name] for side in PAYOUT_SIDES]
        row("logical payouts", [side.operations for side in found])
        row("in the provider's ledger", [side.effects for side in found])
        row("paid more than once", [side.doubled for side in found], should_be=0)
        row("acknowledged but never paid", [side.lost for side in found], should_be=0)
        row("wrong answers", [side.wrong for side in found], should_be=0)
        row("outcome never learned", [side.unsettled for side in found], should_be=0)
        row("parked until somebody decides", [len(side.parked) for side in found])
        row("rows of our own", [rows[side.name] for side in PAYOUT_SIDES], section=True)
        seen("HTTP requests sent", Seen.ATTEMPT)
        seen("502: the provider failed", Seen.PROVIDER_FAILED)
        seen("workers killed in mid-payout", Seen.KILLED_AT_WORK)
        seen("found paid by a reconciler", Seen.RECONCILED)
        row("run again, same derived key", [again, 0, 0, 0])
        row("deduplicated by the provider", [deduplicated, 0, 0, 0])
        self.console.print()
        self.console.print(table)

    def hop_table(self, seen_of: HopSeen) -> None:
        """The orders, what became of their messages, and who was killed on the way."""
        table = Table(title=f"{seen_of.seconds:.0f} seconds of dying relays, workers and brokers", title_justify="left")
        table.add_column("")
        for side in ORDER_SIDES:
            table.add_column(side.title, justify="right")
        row, seen = rows_of(table, [seen_of.tally.of(side.name) for side in ORDER_SIDES])
        found = [seen_of.findings[side.name] for side in ORDER_SIDES]
        row("logical orders, of two messages each", [side.accepted for side in found])
        row("declined orders, rolled back", [side.declined for side in found])
        row("different messages sent", seen_of.messages)
        row("deliveries to a worker", seen_of.deliveries, section=True)
        row(
            "effects, in database and provider's ledger",
            [side.effects for side in found],
            should_be=found[0].expected,
        )
        row("messages with more than one effect", [side.doubled for side in found], should_be=0)
        row("messages lost", [side.lost for side in found], should_be=0)
        row("effects of declined orders", [side.of_declined for side in found], should_be=0)
        row("wrong answers, or charges", [side.wrong for side in found], should_be=0)
        row("outcome never learned", [side.unsettled for side in found], should_be=0)
        row("duplicates answered from the record", [seen_of.replays, 0], section=True)
        seen("HTTP requests sent", Seen.ATTEMPT)
        seen("SIGKILL: server's workers in mid-order", Seen.KILLED_AT_WORK, section=True)
        for kill, label in KILLED.items():
            row(label, [seen_of.kills[kill]] * len(ORDER_SIDES))
        self.console.print()
        self.console.print(table)

    def no_hop(self, why: str) -> None:
        """The same where there was no broker."""
        table = Table(title="The hop through outbox, broker and consumer", title_justify="left")
        table.add_column("left out")
        table.add_row(Text(why))
        self.console.print()
        self.console.print(table)

    def parked(self, labels: Sequence[str], effects: Effects) -> None:
        """Every parked payout, and what the provider's ledger says of it."""
        count = Counter({label: len(ids) for (_, label), ids in effects.items()})
        paid = [label for label in labels if count[label]]
        unpaid = [label for label in labels if not count[label]]
        self.console.print(
            f"Parked, and never made again by themselves: {len(labels)} payouts. The ledger shows {len(paid)} of them "
            f"paid, {max((count[label] for label in paid), default=0)} time at most: {listed(paid)}; "
            f"and {len(unpaid)} not paid: {listed(unpaid)}.",
            markup=False,
        )

    def verdict(
        self,
        findings: Mapping[str, Findings],
        payouts: Mapping[str, Findings],
        hop: Mapping[str, HopFindings],
        complaints: Sequence[str],
        kills: int,
    ) -> None:
        protected, control = findings["protected"], findings["unprotected"]
        self.console.print()
        if complaints:
            self.console.print("[bold red]FAILED.[/]", *(f"\n  - {complaint}" for complaint in complaints), sep="")
            protected_payouts = [side for name, side in payouts.items() if name != CONTROL]
            protected_hop = [side for name, side in hop.items() if name == OUTBOX.name]
            judged: Sequence[Findings | HopFindings] = (protected, *protected_payouts, *protected_hop)
            for example in [example for side in judged for example in side.examples]:
                self.console.print(f"    {example}", style="dim", markup=False)
            return
        self.console.print(
            f"[bold green]PASSED.[/] Protected: {protected.operations:,} charges, {protected.effects:,} effects; "
            f"{kills} killed workers lost or doubled none, and every client was told the one outcome of its charge.\n"
            f"Without protection the same storm charged {control.doubled:,} of {control.operations:,} more than once: "
            f"{control.effects - control.operations:,} effects too many, "
            f"and {control.wrong:,} answers that contradict others.\n"
            f"Of {self.plan.payouts:,} payouts each, the provider made "
            + "; ".join(
                f"{payouts[side.name].effects:,} under {side.title}, {payouts[side.name].doubled:,} of them doubled "
                f"and {len(payouts[side.name].parked):,} parked"
                for side in PAYOUT_SIDES
            )
            + "."
        )
        if not hop:
            self.console.print("The hop through outbox, broker and consumer was left out: there is no Redis server.")
            return
        kept, lost = hop[OUTBOX.name], hop[DIRECT.name]
        self.console.print(
            f"Through outbox, broker and consumer: {kept.expected:,} messages, {kept.effects:,} effects, "
            f"{kept.doubled:,} doubled, {kept.lost:,} lost, {kept.of_declined:,} of orders that were rolled back.\n"
            f"Plain tasks: {lost.expected:,} messages, {lost.effects:,} effects, {lost.doubled:,} doubled, "
            f"{lost.lost:,} lost, {lost.of_declined:,} of orders that were rolled back."
        )


def rows_of(table: Table, counts: Sequence[Counter[Seen]]) -> tuple[Callable[..., None], Callable[..., None]]:
    """What adds a row of figures to a table, and what adds one of things seen, a column for each of ``counts``."""

    def row(label: str, values: Sequence[int], *, should_be: int | None = None, section: bool = False) -> None:
        cells = [f"{value:,}" for value in values]
        if should_be is not None:
            cells = [
                f"[bold green]{cell}[/]" if value == should_be else f"[bold red]{cell}[/]"
                for cell, value in zip(cells, values, strict=True)
            ]
        table.add_row(label, *cells, end_section=section)

    def seen(label: str, *kinds: Seen, section: bool = False) -> None:
        row(label, [sum(column[kind] for kind in kinds) for column in counts], section=section)

    return row, seen


def listed(labels: Sequence[str]) -> str:
    """The labels without what they begin with in common, cut where nobody would read on."""
    names = [label.rpartition("-")[2] for label in labels[:MOST_LISTED]]
    return ", ".join(names + ["…"] * (len(labels) > MOST_LISTED)) or "none"


def unseen(counts: Counter[Seen]) -> int:
    return counts[Seen.CUT] + counts[Seen.TIMEOUT] + counts[Seen.BROKEN]
