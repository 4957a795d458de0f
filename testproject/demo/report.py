"""What the person at the terminal sees: what is going on, how far it is, the table, and the verdict in words.

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

from .plan import Plan
from .tally import Seen, Tally
from .verdict import Findings

SIDES = ("protected", "unprotected")
LINE_EVERY = 3.0  # seconds between two lines where nothing can move


class Report:
    def __init__(self, console: Console, plan: Plan) -> None:
        self.console = console
        self.plan = plan

    def introduce(self) -> None:
        self.console.print(
            f"[bold]Sending {self.plan.operations:,} charges over a bad network to a server that is being killed.[/]\n"
            "Clients stop waiting, cut their connection or send duplicates at the same instant, and retry under one "
            "Idempotency-Key until they know the outcome, while worker processes die by SIGKILL. The same storm meets "
            "an endpoint without protection beside it. Effects are counted in the database."
        )

    def started(self, database: str, port: int) -> None:
        self.console.print(
            f"[dim]{database} is up, {self.plan.workers} gunicorn workers serve 127.0.0.1:{port}, "
            f"the seed is {self.plan.seed}.[/dim]"
        )

    @contextmanager
    def progress(
        self, tally: Tally, effects: Callable[[str], int], kills: Callable[[], int]
    ) -> Iterator[Callable[[], None]]:
        """Yields what is to be called a few times a second while the storm goes on."""
        if self.console.is_terminal:
            with self._moving(tally, effects, kills) as update:
                yield update
        else:
            yield self._lines(tally, effects, kills)

    @contextmanager
    def _moving(
        self, tally: Tally, effects: Callable[[str], int], kills: Callable[[], int]
    ) -> Iterator[Callable[[], None]]:
        bars = Progress(
            TextColumn("{task.description:<11}"), BarColumn(40), MofNCompleteColumn(), TextColumn("charges settled"),
            TimeElapsedColumn(), console=self.console,
        )  # fmt: skip
        tasks = {side: bars.add_task(side, total=self.plan.operations) for side in SIDES}
        with Live(console=self.console, refresh_per_second=4, transient=True) as live:

            def update() -> None:
                counts = {side: tally.of(side) for side in SIDES}
                for side, task in tasks.items():
                    bars.update(task, completed=counts[side][Seen.DONE])
                table = Table(box=None, pad_edge=False)
                table.add_column("so far", style="dim")
                for side in SIDES:
                    table.add_column(side, justify="right", min_width=11)
                table.add_row("requests sent", *(f"{counts[side][Seen.ATTEMPT]:,}" for side in SIDES))
                table.add_row("effects in the database", *(f"{effects(side):,}" for side in SIDES))
                table.add_row("replays", *(f"{counts[side][Seen.REPLAY]:,}" for side in SIDES))
                table.add_row("answers never seen", *(f"{unseen(counts[side]):,}" for side in SIDES))
                table.add_row("workers killed", f"{kills():,}")
                live.update(Group(bars, table), refresh=True)

            update()
            yield update

    def _lines(self, tally: Tally, effects: Callable[[str], int], kills: Callable[[], int]) -> Callable[[], None]:
        started = last = time.monotonic()

        def update() -> None:
            nonlocal last
            if time.monotonic() - last < LINE_EVERY:
                return
            last = time.monotonic()
            counts = {side: tally.of(side) for side in SIDES}
            sides = "; ".join(
                f"{side}: {counts[side][Seen.DONE]:,} charges settled, {counts[side][Seen.ATTEMPT]:,} requests, "
                f"{effects(side):,} effects"
                for side in SIDES
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

        def row(label: str, values: Sequence[int], *, should_be: int | None = None, section: bool = False) -> None:
            cells = [f"{value:,}" for value in values]
            if should_be is not None:
                cells = [
                    f"[bold green]{cell}[/]" if value == should_be else f"[bold red]{cell}[/]"
                    for cell, value in zip(cells, values, strict=True)
                ]
            table.add_row(label, *cells, end_section=section)

        def seen(label: str, *kinds: Seen, section: bool = False) -> None:
            row(label, [sum(counts[side][kind] for kind in kinds) for side in SIDES], section=section)

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
        seen("changed payloads rejected, 422", Seen.MISMATCH)
        seen("told to come back, 503", Seen.UNAVAILABLE)
        seen("other server errors, 5xx", Seen.ERROR, section=True)
        seen("charges whose worker was killed on purpose", Seen.KILLED_AT_WORK)
        seen("stalled workers that woke after a take-over", Seen.OUTLIVED)
        row("claims taken over from dead or stalled workers", [take_overs, 0])
        row("workers killed with SIGKILL, of both sides", [kills] * 2)
        self.console.print()
        self.console.print(table)

    def verdict(self, findings: Mapping[str, Findings], complaints: Sequence[str], kills: int) -> None:
        protected, control = findings["protected"], findings["unprotected"]
        self.console.print()
        if complaints:
            self.console.print("[bold red]FAILED.[/]", *(f"\n  - {complaint}" for complaint in complaints), sep="")
            for example in protected.examples:
                self.console.print(f"    {example}", style="dim", markup=False)
            return
        self.console.print(
            f"[bold green]PASSED.[/] Protected: {protected.operations:,} charges, {protected.effects:,} effects; "
            f"{kills} killed workers lost or doubled none, and every client was told the one outcome of its charge.\n"
            f"Without protection the same storm charged {control.doubled:,} of {control.operations:,} more than once: "
            f"{control.effects - control.operations:,} effects too many, "
            f"and {control.wrong:,} answers that contradict others."
        )


def unseen(counts: Counter[Seen]) -> int:
    return counts[Seen.CUT] + counts[Seen.TIMEOUT] + counts[Seen.BROKEN]
