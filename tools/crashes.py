"""``python -m tools.crashes``: run the full crash matrix and the full storms, and print their tables in Markdown.

It starts a temporary server, unless ``DATABASE_URL`` names one whose account may create databases. Failures are printed
immediately, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import product

from tests.crash.cells import Verdict
from tests.crash.failover import MODES, Failover, run_failover
from tests.crash.matrix import Matrix, run_matrix
from tests.crash.points import DECLARATIONS, FAULTS, POINTS, cells
from tests.crash.storms import Storms, run_restarts, server_to_stop
from tests.harness.mariadb import running_mariadb
from tests.harness.world import server_of, world
from tests.results import note
from tools.reports import markdown, say

KINDS = ["plain", "drf", "async"]
LEVELS = ["READ_COMMITTED", "REPEATABLE_READ", "SERIALIZABLE"]
#: The number of cells between two lines of progress.
PACE = 100
NAMES = ("point", "fault", "declaration")


class Report:
    """Prints progress, failures and totals."""

    def __init__(self) -> None:
        self.failed = False
        self._started = time.monotonic()
        self._cells = 0

    def cell(self, verdict: Verdict) -> None:
        self._cells += 1
        if not verdict.passed:
            say(verdict)
        elif self._cells % PACE == 0:
            say(f"… {self._cells} cells, {self.seconds:.0f} s")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def total(self, name: str, total: object, *, passed: bool) -> None:
        self.failed |= not passed
        say(f"\n## {name}\n\n{total}; {self.seconds:.0f} s.{'' if passed else ' FAILED'}")
        self._started, self._cells = time.monotonic(), 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.crashes", description=__doc__)
    parser.add_argument("--database", choices=["mariadb", "postgres", "sqlite"], default="postgres")
    parser.add_argument("--pgbouncer", action="store_true", help="run the matrix through PgBouncer in transaction mode")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each cell, each prepared differently")
    parser.add_argument("--first-seed", type=int, default=0)
    for name, values in zip(NAMES, (POINTS, FAULTS, DECLARATIONS), strict=True):
        parser.add_argument(f"--{name}", choices=values, action="append", help="run only this one; may be repeated")
    parser.add_argument("--kind", choices=KINDS, default="plain", help="the kind of view")
    parser.add_argument("--level", choices=LEVELS, default=None, help="the isolation level, on PostgreSQL")
    parser.add_argument("--all", action="store_true", help="run every kind and level on PostgreSQL, direct and pooled")
    parser.add_argument("--restarts", type=int, default=0, help="how often PostgreSQL is stopped under load")
    parser.add_argument("--failover", action="store_true", help="only run the failover")
    options = parser.parse_args(arguments)
    if options.database != "postgres" and (options.pgbouncer or options.all):
        parser.error("--pgbouncer and --all require PostgreSQL")
    chosen = [
        cell
        for cell in cells(options.seeds, options.first_seed)
        if all(getattr(cell, name) in (getattr(options, name) or [getattr(cell, name)]) for name in NAMES)
    ]
    report = Report()
    if options.failover:
        runs = [run_failover(mode) for mode in MODES]
        for run in runs:
            note_storms(f"failover: {run.mode}", run.storms, as_expected=run.is_as_expected)
        report.total("Failover", f"{len(runs)} times", passed=all(run.is_as_expected for run in runs))
        say(f"\n{failovers(runs)}")
        return 1 if report.failed else 0
    with ExitStack() as stack:
        url = "sqlite:" if options.database == "sqlite" else os.environ.get("DATABASE_URL")
        if options.database == "mariadb" and url is None:
            url = stack.enter_context(running_mariadb())
        ways = [(options.pgbouncer, options.kind, options.level)]
        for pooled, kind, level in product((False, True), KINDS, LEVELS) if options.all else ways:
            with world("tests.crash.worker", url, pooled=pooled) as shared:
                matrix = run_matrix(shared, chosen, tell=report.cell, kind=kind, level=level)
                server = server_of(shared.url)
            note(
                "matrix",
                database=shared.database,
                server=server,
                pgbouncer=pooled,
                kind=kind,
                level=level,
                seeds=f"{options.first_seed} to {options.first_seed + options.seeds - 1}",
                cells=len(matrix.verdicts),
                fired=sum(verdict.fired for verdict in matrix.verdicts),
                violations=len(matrix.failures),
                seconds=round(report.seconds),
                **{name: ",".join(getattr(options, name) or ()) for name in NAMES},
                **failed_by(map(str, matrix.failures)),
            )
            name = f"The matrix{', PgBouncer' if pooled else ''}, {kind}{f', {level}' if level else ''}"
            report.total(name, totals(matrix), passed=not matrix.failures)
            say(f"\n{table(matrix)}\n\n{reasons(matrix)}")
    if options.restarts:
        with server_to_stop() as server:
            storms = run_restarts(server, options.restarts, seed=options.first_seed)
            note_storms("stops", storms, as_expected=storms.is_safe, fired=options.restarts, seed=options.first_seed)
            report.total("Restarts", f"{options.restarts} times; {storms}", passed=storms.is_safe)
            server.stop_being_durable()
            control = run_restarts(server, 3)
            note_storms("stops: control", control, as_expected=bool(control.inside.unexplained), fired=3, seed=0)
            report.total("Restarts, control without durable commits", control, passed=bool(control.inside.unexplained))
    return 1 if report.failed else 0


def failed_by(problems: Iterable[str]) -> dict[str, str]:
    """The figure that marks a run as failed."""
    text = "; ".join(problems)
    return {"failed": text[:300]} if text else {}


def note_storms(what: str, storms: Storms, *, as_expected: bool, **figures: object) -> None:
    note(
        what,
        database="postgres",
        operations=storms.acknowledged,
        rows=len(storms.inside.known),
        lost=len(storms.inside.unexplained),
        torn=storms.torn,
        reconcile=len(storms.ask.known),
        reconcile_doubled=storms.ask.doubled,
        park=len(storms.park.known),
        park_doubled=storms.park.doubled,
        **storms.figures,
        **figures,
        **failed_by([] if as_expected else [str(storms)]),
    )


def totals(matrix: Matrix) -> str:
    verdicts = matrix.verdicts
    excluded = sum(len(cells) for cells in matrix.excluded.values())
    return (
        f"{matrix.database}: {len(verdicts)} cells run, {len(verdicts) - len(matrix.failures)} ok, "
        f"{len(matrix.failures)} failed, {excluded} excluded; "
        f"doubled {sum(v.doubled for v in verdicts)}, lost {sum(v.lost for v in verdicts)}, "
        f"stale writes {sum(v.stale_writes for v in verdicts)}, "
        f"fired {sum(v.fired for v in verdicts)} of {len(verdicts)}; "
        f"{sum(v.processes for v in verdicts)} processes, {sum(v.parked for v in verdicts)} parked"
    )


def table(matrix: Matrix) -> str:
    """A row for each point and a column for each fault, whose cells mark the declarations in their order."""
    marks: dict[tuple[str, str, str], str] = {}
    for excluded in matrix.excluded.values():
        marks |= {cell.kind: "–" for cell in excluded}
    for verdict in matrix.verdicts:
        if marks.get(verdict.cell.kind) != "✗":
            marks[verdict.cell.kind] = "✓" if verdict.passed else "✗"
    rows = [
        [words, *(" ".join(marks.get((point, fault, name), " ") for name in DECLARATIONS) for fault in FAULTS)]
        for point, words in POINTS.items()
    ]
    return markdown(["point", *FAULTS], rows)


def reasons(matrix: Matrix) -> str:
    counts = {reason: len({cell.kind for cell in cells}) for reason, cells in matrix.excluded.items()}
    return "\n".join(f"- {n} {'cell' if n == 1 else 'cells'}: {reason}." for reason, n in counts.items())


HEADS = (
    *("commits wait for", "rows", "lost", "torn", "doubled"),
    *("Reconcile", "doubled", "PARK", "doubled", "parked", "warned"),
)


def failovers(runs: list[Failover]) -> str:
    return markdown(
        HEADS,
        [
            [
                run.mode,
                *(len(storms.inside.known), len(storms.inside.unexplained), storms.torn, storms.inside.doubled),
                *(n for storm in (storms.ask, storms.park) for n in (len(storm.known), storm.doubled)),
                *(len(storms.park.parked), "yes" if run.warned else "no"),
            ]
            for run in runs
            for storms in [run.storms]
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
