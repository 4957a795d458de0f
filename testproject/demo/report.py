"""What the person at the terminal sees: what is going on, how far it is, the tables, and the verdict in words.

On a terminal the figures move; elsewhere, as in a log, a line is printed now and then.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .acts import CHARGES, DIRECT, ORDERS, OUTBOX, PAYOUTS, SOME, Act, Row, Side
from .books import Books
from .plan import Plan
from .seen import Tally
from .verdict import Findings

MOST_LISTED = 40  # labels
LINE_EVERY = 3.0  # seconds between two lines where nothing can move


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
    def progress(
        self, act: Act, operations: int, books: Books, tally: Tally, kills: Callable[[], int]
    ) -> Iterator[Callable[[], None]]:
        """Yields what is to be called a few times a second while the storm goes on."""

        def figures(side: Side) -> dict[str, int]:
            counts = tally.of(side.name)
            return {
                "requests sent": counts["attempt"],
                f"effects {act.where}": books.count(act, side),
                "replays": counts["replay"],
                "answers never seen": counts["cut"] + counts["timeout"] + counts["broken"],
            }

        if not self.console.is_terminal:
            yield self._lines(act, tally, figures, kills)
            return
        bars = Progress(
            TextColumn("{task.description:<11}"),
            BarColumn(40),
            MofNCompleteColumn(),
            TextColumn(f"{act.noun} settled"),
            TimeElapsedColumn(),
            console=self.console,
        )
        tasks = {side: bars.add_task(side.name, total=operations) for side in act.sides}
        with Live(console=self.console, refresh_per_second=4, transient=True) as live:

            def update() -> None:
                table = Table(box=None, pad_edge=False)
                table.add_column("so far", style="dim")
                for side, task in tasks.items():
                    bars.update(task, completed=tally.of(side.name)["done"])
                    table.add_column(side.name, justify="right", min_width=11)
                columns = [figures(side) for side in act.sides]
                for name in columns[0]:
                    table.add_row(name, *(f"{column[name]:,}" for column in columns))
                table.add_row("workers killed", f"{kills():,}")
                live.update(Group(bars, table), refresh=True)

            update()
            yield update

    def _lines(
        self, act: Act, tally: Tally, figures: Callable[[Side], Mapping[str, int]], kills: Callable[[], int]
    ) -> Callable[[], None]:
        started = last = time.monotonic()

        def update() -> None:
            nonlocal last
            if time.monotonic() - last < LINE_EVERY:
                return
            last = time.monotonic()
            sides = []
            for side in act.sides:
                sent, effects, *_ = figures(side).values()
                settled = tally.of(side.name)["done"]
                sides.append(f"{side.name}: {settled:,} {act.noun} settled, {sent:,} requests, {effects:,} effects")
            self.console.print(f"{last - started:4.0f} s  {'; '.join(sides)}; {kills()} killed", soft_wrap=True)

        return update

    def table(self, act: Act, findings: Mapping[str, Findings], seconds: float) -> None:
        """The figures of all sides of an act beside each other."""
        table = Table(title=f"{seconds:.0f} seconds of {act.title}", title_justify="left")
        table.add_column("")
        for side in act.sides:
            table.add_column(side.title, justify="right")
        for row in act.rows:
            cells = (cell_of(row, side, findings[side.name].figures) for side in act.sides)
            table.add_row(row.label, *cells, end_section=row.ends)
        self.console.print()
        self.console.print(table)

    def no_hop(self, why: str) -> None:
        """The same where there was no broker."""
        table = Table(title="The hop through outbox, broker and consumer", title_justify="left")
        table.add_column("left out")
        table.add_row(Text(why))
        self.console.print()
        self.console.print(table)

    def parked(self, labels: Sequence[str], effects: Mapping[str, Sequence[int]]) -> None:
        """Every parked payout, and what the provider's ledger says of it."""
        count = {name.partition("/")[2]: len(ids) for name, ids in effects.items()}
        paid = [label for label in labels if label in count]
        unpaid = [label for label in labels if label not in count]
        self.console.print(
            f"Parked, and never made again by themselves: {len(labels)} payouts. The ledger shows {len(paid)} of them "
            f"paid, {max((count[label] for label in paid), default=0)} time at most: {listed(paid)}; "
            f"and {len(unpaid)} not paid: {listed(unpaid)}.",
            markup=False,
        )

    def failed(self, complaints: Sequence[str], findings: Mapping[str, Mapping[str, Findings]]) -> None:
        """Why the run failed, and the first few cases where it is something that must not be."""
        self.console.print("\n[bold red]FAILED.[/]", *(f"\n  - {complaint}" for complaint in complaints), sep="")
        for act in (CHARGES, PAYOUTS, ORDERS):
            for side in act.sides:
                if act.noun in findings and not side.control:
                    for example in findings[act.noun][side.name].examples:
                        self.console.print(f"    {example}", style="dim", markup=False)

    def passed(self, findings: Mapping[str, Mapping[str, Findings]], kills: int) -> None:
        """What the run has shown."""
        protected, control = (findings["charges"][side.name].figures for side in CHARGES.sides)
        payouts = [(side.title, findings["payouts"][side.name].figures) for side in PAYOUTS.sides]
        self.console.print(
            f"\n[bold green]PASSED.[/] Protected: {protected['operations']:,} charges, {protected['effects']:,} "
            f"effects; {kills} killed workers lost or doubled none, and every client was told the one outcome of its "
            f"charge.\nWithout protection the same storm charged {control['doubled']:,} of {control['operations']:,} "
            f"more than once: {control['effects'] - control['operations']:,} effects too many, "
            f"and {control['wrong']:,} answers that contradict others.\n"
            f"Of {self.plan.payouts:,} payouts each, the provider made "
            + "; ".join(
                f"{figures['effects']:,} under {title}, {figures['doubled']:,} of them doubled and "
                f"{figures['parked']:,} parked"
                for title, figures in payouts
            )
            + "."
        )
        if "orders" not in findings:
            self.console.print("The hop through outbox, broker and consumer was left out: there is no Redis server.")
            return
        for words, side in (("Through outbox, broker and consumer", OUTBOX), ("Plain tasks", DIRECT)):
            figures = findings["orders"][side.name].figures
            self.console.print(
                f"{words}: {figures['expected']:,} messages, {figures['effects']:,} effects, {figures['doubled']:,} "
                f"doubled, {figures['lost']:,} lost, {figures['ghosts']:,} of orders that were rolled back."
            )


def cell_of(row: Row, side: Side, figures: Counter[str]) -> str:
    """The figure; green or red where it is said that nothing is wrong, or that something is, with whatever side."""
    if row.only not in {"", side.name}:
        return ""
    value = f"{figures[row.figure]:,}"
    ideal = row.parking if side.may_park and row.parking else row.must
    if ideal is None or ideal.words == SOME.words:
        return value
    return f"[bold {'green' if ideal.holds(figures[row.figure], figures) else 'red'}]{value}[/]"


def listed(labels: Sequence[str]) -> str:
    """The numbers of the labels, cut where nobody would read on."""
    names = [label.rpartition("-")[2] for label in labels[:MOST_LISTED]]
    return ", ".join(names + ["…"] * (len(labels) > MOST_LISTED)) or "none"
