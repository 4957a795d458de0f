"""What the person at the terminal sees: what is to come, how far it is, the tables, and the verdict in words."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from .acts import ACTS, ORDERS, SOME, Act, Row, Side
from .books import Books
from .client import Tally
from .plan import Plan
from .verdict import Findings

MOST_LISTED = 40  # labels
LINE_EVERY = 3.0  # seconds between two lines where nothing can move
#: What is said in the end of each side of an act that has such a row: a figure, and its words.
SUMMARY = {
    "effects": "effects",
    "doubled": "doubled",
    "lost": "lost",
    "parked": "parked",
    "wrong": "wrong answers",
    "ghosts": "of orders that were rolled back",
}


class Report:
    def __init__(self, console: Console, plan: Plan) -> None:
        self.console = console
        self.plan = plan

    def introduce(self, without_hop: str = "") -> None:
        """Say what is to come. ``without_hop``: why there is no broker."""
        for act in ACTS:
            if act is not ORDERS or not without_hop:
                self.console.print(act.story.format(self.plan))
        self.no_hop(without_hop)

    def no_hop(self, why: str) -> None:
        if why:
            self.console.print(f"The hop through outbox, broker and consumer is left out. {why}", markup=False)

    def started(self, database: str, port: int) -> None:
        self.console.print(
            f"[dim]{database} is up, {self.plan.workers} gunicorn workers serve 127.0.0.1:{port}, "
            f"the seed is {self.plan.seed}.[/dim]"
        )

    @contextmanager
    def progress(self, act: Act, books: Books, tally: Tally, kills: Callable[[], int]) -> Iterator[Callable[[], None]]:
        """Yields what is to be called a few times a second while the storm goes on.

        On a terminal one line moves. Elsewhere, as in a log, a line is printed now and then.
        """
        started = last = time.monotonic()

        def line() -> str:
            sides = []
            for side in act.sides:
                seen = tally.of(side.name)
                figures = (
                    f"{seen['done']:,} {act.noun} settled, {seen['attempt']:,} requests, {books.count(act, side):,} "
                    f"effects {act.where}"
                )
                sides.append(f"{side.name}: {figures}")
            return f"{time.monotonic() - started:4.0f} s  {'; '.join(sides)}; {kills()} killed"

        def update() -> None:
            nonlocal last
            if self.console.is_terminal:
                status.update(line())
            elif time.monotonic() - last >= LINE_EVERY:
                last = time.monotonic()
                self.console.print(line(), soft_wrap=True)

        with self.console.status(act.title) as status:
            yield update

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

    def failed(self, complaints: Sequence[str], findings: Mapping[Act, Mapping[str, Findings]]) -> None:
        """Why the run failed, and the first few cases where it is something that must not be."""
        self.console.print("\n[bold red]FAILED.[/]", *(f"\n  - {complaint}" for complaint in complaints), sep="")
        for act, found in findings.items():
            for side in act.sides:
                if not side.control:
                    for example in found[side.name].examples:
                        self.console.print(f"    {example}", style="dim", markup=False)

    def passed(self, findings: Mapping[Act, Mapping[str, Findings]], kills: int) -> None:
        """What the run has shown."""
        self.console.print(
            f"\n[bold green]PASSED.[/] {kills} killed workers lost or doubled nothing that was protected, and every "
            "client was told the one outcome."
        )
        for act, found in findings.items():
            words = {row.figure: SUMMARY[row.figure] for row in act.rows if row.figure in SUMMARY}
            for side in act.sides:
                figures = found[side.name].figures
                seen = [f"{figures[name]:,} {counted}" for name, counted in words.items()]
                self.console.print(f"  {side.title}: {figures['expected']:,} {act.counted}, {', '.join(seen)}.")


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
