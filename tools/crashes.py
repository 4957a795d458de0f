"""``python -m tools.crashes``: the full matrix and the full storms, and their tables in Markdown.

It brings up a server of its own, unless ``DATABASE_URL`` names one that may make databases. What goes wrong is told at
once, and the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack

from tests.crash.arena import arena
from tests.crash.failover import MODES, run_failover, table
from tests.crash.matrix import run_matrix, run_zombies
from tests.crash.points import DATABASES, DECLARATIONS, FAULTS, POINTS, cells
from tests.crash.processes import Verdict
from tests.crash.storms import run_lost_acknowledgements, run_restarts, server_to_stop
from tests.harness.mariadb import running_mariadb
from tests.harness.world import say

#: How many cells between two signs of life.
PACE = 100
NAMES = ("point", "fault", "declaration")


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

    def total(self, name: str, total: object, *, passed: bool) -> None:
        self.failed |= not passed
        say(f"\n## {name}\n\n{total}; {time.monotonic() - self._started:.0f} s.{'' if passed else ' FAILED'}")
        self._started, self._cells = time.monotonic(), 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.crashes", description=__doc__)
    parser.add_argument("--database", choices=DATABASES, default="postgres")
    parser.add_argument("--pgbouncer", action="store_true", help="the matrix through PgBouncer in transaction mode")
    parser.add_argument("--seeds", type=int, default=1, help="how often each cell runs, each time prepared otherwise")
    parser.add_argument("--first-seed", type=int, default=0)
    for name, values in zip(NAMES, (POINTS, FAULTS, DECLARATIONS), strict=True):
        parser.add_argument(f"--{name}", choices=values, action="append", help="only this one; may be repeated")
    parser.add_argument("--zombies", type=int, default=0, help="how many frozen processes, on PostgreSQL")
    parser.add_argument("--acknowledgements", type=int, default=0, help="how many to swallow, on PostgreSQL")
    parser.add_argument("--restarts", type=int, default=0, help="how many stops of PostgreSQL in mid-load")
    parser.add_argument("--failover", action="store_true", help="only kill a primary and promote its standby")
    options = parser.parse_args()
    if options.pgbouncer and (options.database != "postgres" or options.zombies or options.acknowledgements):
        parser.error("--pgbouncer is about the matrix on PostgreSQL")
    chosen = [
        cell
        for cell in cells(options.seeds, options.first_seed)
        if all(getattr(cell, name) in (getattr(options, name) or [getattr(cell, name)]) for name in NAMES)
    ]
    report = Report()
    if options.failover:
        runs = [run_failover(mode) for mode in MODES]
        report.total("Failover", f"{len(runs)} times", passed=all(run.is_as_expected for run in runs))
        say(f"\n{table(runs)}")
        return 1 if report.failed else 0
    with ExitStack() as stack:
        url = "sqlite:" if options.database == "sqlite" else os.environ.get("DATABASE_URL")
        if options.database == "mariadb" and url is None:
            url = stack.enter_context(running_mariadb())
        shared = stack.enter_context(arena(url, pooled=options.pgbouncer))
        matrix = run_matrix(shared, chosen, tell=report.cell)
        report.total("The matrix", matrix.totals(), passed=not matrix.failures)
        say(f"\n{matrix.table()}\n\n{matrix.reasons()}")
        if options.zombies:
            crowds = run_zombies(shared, options.zombies)
            for verdict in crowds.verdicts:
                report.cell(verdict)
            report.total("Zombies", crowds.totals(), passed=not crowds.failures)
        if options.acknowledgements:
            tally = run_lost_acknowledgements(options.acknowledgements, shared.url)
            report.total("Lost acknowledgements", tally, passed=tally.passed)
    if options.restarts:
        with server_to_stop() as server:
            tally = run_restarts(server, options.restarts)
            report.total("Restarts", tally, passed=tally.passed)
            server.stop_being_durable()
            control = run_restarts(server, 3)
            report.total("Restarts, control without durable commits", control, passed=control.lost > 0)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
