"""What a record takes, and what the statements of a request cost, in tables of growing size."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from functools import partial

from django.db import connection

from tests.benchmarks.report import Table, bytes_of, microseconds, milliseconds

from .filling import RECORDS_PER_ACCOUNT, TABLE, account, fill, fill_to
from .metering import Operation, sizes, written

#: The sizes of the tables, as parts of the largest.
PARTS = (1000, 10, 1)
#: This many operations are measured at a time.
BLOCK = 500
#: The log is measured this many operations after a checkpoint, as long as they are at most a tenth of the table.
LATER = (0, 10_000, 100_000, 1_000_000)
ACCOUNTS = 1000


def compare(rows: int, seed: int, progress: Callable[[str], None]) -> list[Table]:
    lots = random.Random(seed)
    size = Table("Size", ("rows", "table", *_indexes(), "all", "a record"))
    cost = Table(
        "Cost of the statements", ("rows", *_headings("time"), *_headings("CPU server"), *_headings("buffers"))
    )
    log = Table(
        "Log of a first execution",
        ("rows", *(f"{later:,} operations after a checkpoint" for later in LATER)),
        "Claim and completing update, with their commits. In brackets the whole pages among them.",
    )
    for part in PARTS:
        count = rows // part
        fill_to(count, progress)
        found = sizes(TABLE)
        total = sum(found.values())
        parts = (megabytes(found[name]) for name in (TABLE, *_indexes()))
        size.add(f"{count:,}", *parts, megabytes(total), bytes_of(total / count))
        operation = Operation(partial(lots.choice, _accounts(count, lots)))
        log.add(f"{count:,}", *(_log(count, later, operation, progress) for later in LATER))
        _add_cost(cost, count, operation, progress)
    return [size, cost, log]


def _headings(kind: str) -> tuple[str, ...]:
    return tuple(f"{what}, {kind}" for what in ("claim", "update", "replay"))


def _indexes() -> list[str]:
    return sorted(set(sizes(TABLE)) - {TABLE})


def _accounts(rows: int, lots: random.Random) -> list[str]:
    return [account(lots.randrange(1 + rows // RECORDS_PER_ACCOUNT)) for _ in range(ACCOUNTS)]


def _log(rows: int, later: int, operation: Operation, progress: Callable[[str], None]) -> str:
    """The log of ``BLOCK`` operations, ``later`` operations after a checkpoint."""
    if later > rows // 10:
        return "–"
    with connection.cursor() as cursor:
        cursor.execute("CHECKPOINT")
        fill(cursor, TABLE, rows, rows + later, rows, progress)
    progress(f"growth: {rows:,} rows, {later:,} operations after a checkpoint")
    before = written()
    for _ in range(BLOCK):
        operation.run()
    log = written().since(before)
    return f"{bytes_of(log.bytes / BLOCK)} ({log.pages / BLOCK:.2f})"


def _add_cost(cost: Table, rows: int, operation: Operation, progress: Callable[[str], None]) -> None:
    progress(f"growth: {rows:,} rows, the cost of the statements")
    statements = (operation.claim, operation.complete, operation.replay)
    for statement in statements:
        statement.seconds.clear()  # those right after a checkpoint belong to the log
        statement.server_cpu.clear()
    for _ in range(BLOCK):
        operation.run()
    for _ in range(20):
        operation.explain()
    cost.add(
        f"{rows:,}",
        *(milliseconds(statistics.median(statement.seconds)) for statement in statements),
        *(microseconds(statistics.median(statement.server_cpu)) for statement in statements),
        *(f"{statistics.median(statement.buffers):g}" for statement in statements),
    )


def megabytes(number: float) -> str:
    return f"{number / 1e6:,.1f} MB"
