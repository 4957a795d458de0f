"""``python -m tests.crash``: the full matrix and the full storms, and their tables in Markdown.

It brings up a PostgreSQL of its own, unless ``DATABASE_URL`` names one that may make databases. What goes wrong is told
at once, and the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.crash.arena import arena
from tests.crash.matrix import Matrix, run_matrix
from tests.crash.points import DATABASES, DECLARATIONS, FAULTS, POINTS, cells
from tests.crash.processes import Verdict
from tests.crash.storms import run_lost_acknowledgements, run_restarts
from tests.crash.zombies import run_zombies
from tests.harness.world import say

#: How many cells between two signs of life.
PACE = 100


class Report:
    """What is told while it runs, and at the end."""

    def __init__(self) -> None:
        self.failed = False
        self._started = time.monotonic()
        self._cells = 0

    def cell(self, verdict: Verdict) -> None:
        self._cells += 1
        if not verdict.passed:
            say(verdict)
        elif self._cells % PACE == 0:
            say(f"… {self._cells} cells, {time.monotonic() - self._started:.0f} s")

    def matrix(self, name: str, matrix: Matrix) -> None:
        self.failed |= bool(matrix.failures)
        say(f"\n## {name}\n\n{matrix.totals()}; {self._lap()}.")

    def tally(self, name: str, tally: object, *, passed: bool) -> None:
        self.failed |= not passed
        say(f"\n## {name}\n\n{tally}; {self._lap()}.{'' if passed else ' FAILED'}")

    def _lap(self) -> str:
        started, self._started, self._cells = self._started, time.monotonic(), 0
        return f"{self._started - started:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--database", choices=DATABASES, default="postgres")
    parser.add_argument("--seeds", type=int, default=1, help="how often each cell runs, each time prepared otherwise")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--point", choices=POINTS, action="append", help="only this place; may be repeated")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="only this fault; may be repeated")
    parser.add_argument("--declaration", choices=DECLARATIONS, action="append", help="only this one; may be repeated")
    parser.add_argument("--zombies", type=int, default=0, help="how many frozen processes, on PostgreSQL")
    parser.add_argument("--acknowledgements", type=int, default=0, help="how many to swallow, on PostgreSQL")
    parser.add_argument("--restarts", type=int, default=0, help="how many stops of PostgreSQL in mid-load")
    options = parser.parse_args()
    chosen = [
        cell
        for cell in cells(options.seeds, options.first_seed)
        if (not options.point or cell.point in options.point)
        and (not options.fault or cell.fault in options.fault)
        and (not options.declaration or cell.declaration in options.declaration)
    ]
    report = Report()
    with arena("sqlite:" if options.database == "sqlite" else os.environ.get("DATABASE_URL")) as shared:
        matrix = run_matrix(shared, chosen, tell=report.cell)
        report.matrix("The matrix", matrix)
        say(f"\n{matrix.table()}\n\n{matrix.reasons()}")
        if options.zombies:
            crowds = run_zombies(shared, options.zombies)
            for verdict in crowds.verdicts:
                report.cell(verdict)
            report.matrix("Zombies", crowds)
        if options.acknowledgements:
            tally = run_lost_acknowledgements(options.acknowledgements, shared.url)
            report.tally("Lost acknowledgements", tally, passed=not (tally.lost or tally.doubled or tally.stale_writes))
    if options.restarts:
        tally = run_restarts(options.restarts)
        report.tally("Restarts", tally, passed=not (tally.lost or tally.doubled or tally.stale_writes))
        control = run_restarts(3, parameters={"synchronous_commit": "off", "wal_writer_delay": "10s"})
        report.tally("Restarts, control without durable commits", control, passed=control.lost > 0)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
