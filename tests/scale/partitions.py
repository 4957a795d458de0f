"""The purge of partitioned tables, several partitions at a time, beside one DELETE."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial

from django.core.management import call_command
from django.db import connection

from idempotency.upkeep.retention import MAX_BATCH_SIZE, purge_batches
from tests.benchmarks.instruments import relative
from tests.benchmarks.report import Table, times

from .filling import DUE, fill_to
from .purging import PLAIN, delete, nth_due

PARTITIONS = 16
JOBS = (1, 2, 4)
ROUNDS = 3


def compare(rows: int, seed: int, progress: Callable[[str], None]) -> list[Table]:
    fill_to(rows, progress)
    progress(f"partitions: copying {rows:,} rows")
    start = time.monotonic()
    call_command("idempotency_partition", partitions=PARTITIONS, copy=True, verbosity=0)
    copied = rows / (time.monotonic() - start)
    share = int(rows * DUE) // ROUNDS // (len(JOBS) + 1)
    variants: dict[str, Callable[[datetime], int]] = {PLAIN: delete}
    variants |= {f"--jobs {jobs}": partial(_purge, share, jobs) for jobs in JOBS}
    rates: dict[str, list[float]] = {name: [] for name in variants}
    lots = random.Random(seed)
    for number in range(ROUNDS):
        for name in lots.sample(list(variants), len(variants)):
            progress(f"partitions: round {number + 1}, {name}")
            last = nth_due(share)
            with connection.cursor() as cursor:
                cursor.execute("CHECKPOINT")
            start = time.monotonic()
            deleted = variants[name](last)
            rates[name].append(deleted / (time.monotonic() - start))
    table = Table(
        f"Purge of {PARTITIONS} partitions, after rows were copied into them at {copied:,.0f} a second",
        ("", "rows a second", f"× {PLAIN}"),
    )
    for name in variants:
        table.add(
            name,
            f"{statistics.median(rates[name]):,.0f}",
            times(relative(rates[name], rates[PLAIN])),
        )
    return [table]


def _purge(share: int, jobs: int, last: datetime) -> int:
    deleted = 0
    for result in purge_batches(batch_size=min(MAX_BATCH_SIZE, max(1, share // jobs)), jobs=jobs):
        deleted += result.deleted
        if deleted >= share:
            break
    return deleted
