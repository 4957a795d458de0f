"""Measures the cost of an operation: time, CPU of client and server, WAL bytes, fsyncs and round trips."""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from django.db import connection

NANOSECONDS = 1e9
T = TypeVar("T")


@dataclass
class Cost:
    """The measurements of one variant. Times are in seconds."""

    # one entry for each operation
    seconds: list[float] = field(default_factory=list)
    client_cpu: list[float] = field(default_factory=list)
    # one entry for each block: the cost of one operation in it
    block_seconds: list[float] = field(default_factory=list)
    block_client_cpu: list[float] = field(default_factory=list)
    block_server_cpu: list[float] = field(default_factory=list)
    block_wal: list[float] = field(default_factory=list)  # bytes
    fsyncs: int = 0
    round_trips: int | None = None

    @property
    def block_cpu(self) -> list[float]:
        """The sum of client and server."""
        return [client + server for client, server in zip(self.block_client_cpu, self.block_server_cpu, strict=False)]


def turns(
    what: str, variants: Collection[T], rounds: int, lots: random.Random, progress: Callable[[str], None]
) -> Iterator[tuple[T, bool]]:
    """Yield each variant in each round, in random order, so that noise affects all alike, and whether the round counts.

    The first round doesn't count, because it warms up caches.
    """
    for number in range(rounds + 1):
        progress(f"{what}, round {number} of {rounds}")
        for variant in lots.sample(list(variants), len(variants)):
            yield variant, number > 0


def p95(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.95)]


def relative(blocks: list[float], base: list[float]) -> float | None:
    """The median over the rounds of the ratio to ``base``.

    The two ran shortly after each other in each round, so other load on the machine affects this less than a ratio of
    medians.
    """
    quotients = [block / other for block, other in zip(blocks, base, strict=True) if other]
    return statistics.median(quotients) if quotients else None


def measure_block(cost: Cost, operations: Iterable[Callable[[], object]]) -> None:
    """Time each of ``operations``, and read the server's counters before and after all of them.

    The first operation is not timed, because reading the counters evicts caches.
    """
    warm_up, *timed = operations
    gc.collect()
    warm_up()
    before = _counters()
    for operation in timed:
        cpu = time.thread_time_ns()
        start = time.perf_counter_ns()
        operation()
        end = time.perf_counter_ns()
        cost.client_cpu.append((time.thread_time_ns() - cpu) / NANOSECONDS)
        cost.seconds.append((end - start) / NANOSECONDS)
    after = _counters(cpu_first=True)
    cost.block_seconds.append(statistics.median(cost.seconds[-len(timed) :]))
    cost.block_client_cpu.append(statistics.median(cost.client_cpu[-len(timed) :]))
    cost.block_wal.append((after.wal - before.wal) / len(timed))
    cost.fsyncs += after.fsyncs - before.fsyncs
    if before.cpu is not None and after.cpu is not None:
        cost.block_server_cpu.append((after.cpu - before.cpu) / len(timed) / NANOSECONDS)


def round_trips(operation: Callable[[], object]) -> int | None:
    """The number of round trips, from libpq's trace. None if libpq can't trace."""
    server = connection.connection.pgconn
    with tempfile.TemporaryFile() as log:
        try:
            server.trace(log.fileno())
        except NotImplementedError:  # other than Linux
            return None
        try:
            operation()
        finally:
            server.untrace()
        log.seek(0)
        return log.read().count(b"\tReadyForQuery")


class _Counters(NamedTuple):
    wal: int
    fsyncs: int
    cpu: int | None


def _counters(*, cpu_first: bool = False) -> _Counters:
    # The CPU is read after these statements at a block's start, and before them at its end, so that it excludes them.
    cpu = server_cpu() if cpu_first else None
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')")
        wal = int(cursor.fetchone()[0])
        cursor.execute("SELECT pg_stat_force_next_flush()")
        if connection.pg_version >= 180000:
            cursor.execute("SELECT sum(fsyncs) FROM pg_stat_io WHERE object = 'wal'")
        else:
            cursor.execute("SELECT wal_sync FROM pg_stat_wal")
        (fsyncs,) = cursor.fetchone()
    return _Counters(wal, int(fsyncs), cpu if cpu_first else server_cpu())


def server_cpu() -> int | None:
    """CPU time of this connection's server process, in nanoseconds. None if the process is not visible."""
    process = Path("/proc", str(connection.connection.info.backend_pid))
    try:
        if (process / "comm").read_text().strip() != "postgres":
            return None  # a remote server, whose process id names another process here
        return int((process / "schedstat").read_text().split()[0])
    except OSError:
        return None
