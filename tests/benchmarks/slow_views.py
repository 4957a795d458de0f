"""Async views that wait, many of them at once: throughput, latency, threads and connections.

Each client has a thread here, and asks one thing after the other. The server is one uvicorn process.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from django.contrib.auth.models import User

from .report import Table, milliseconds
from .requests import Caller, effects
from .service.serving import Client, cpu_seconds, serving, sessions
from .storm import p95

#: How many clients, and for how many seconds a view waits. The first load asks for more than one process can do, the
#: second for less.
LOADS = ((200, 0.5), (100, 2.0))
#: How many connections the server's pool may open: few, or one for each request.
POOLS = (20, 200)
LOOK_EVERY = 0.05  # seconds
VARIANTS = {
    "bare view": "/slow/bare/",
    "bare view, queries before it waits": "/slow/bare/query-first/",
    "**this package**": "/slow/package/",
    "**this package**, queries before it waits": "/slow/package/query-first/",
    "the same with `transaction=False`": "/slow/package/autocommit/",
}


@dataclass
class Load:
    """What one variant needed with one size of the pool. The needs are the highest that were seen."""

    latencies: list[float] = field(default_factory=list)  # seconds
    rate: float = 0.0  # requests per second
    cpu: float = 0.0  # seconds of the server for each request, in the mean
    threads: int = 0
    connections: int = 0
    in_transaction: int = 0


def compare(operations: int, seed: int, progress: Callable[[str], None]) -> list[Table]:
    """Let each client ask once for every 600 ``operations``, under each load and at each size of the pool."""
    user = User.objects.create_user("benchmark")
    lots, tables = random.Random(seed), []
    for clients, seconds in LOADS:
        loads = {(pool, path): Load() for pool in POOLS for path in VARIANTS.values()}
        for pool in POOLS:
            with serving("uvicorn", BENCHMARK_POOL=str(pool), BENCHMARK_SLOW_SECONDS=str(seconds)) as (place, process):
                for name, path in lots.sample(list(VARIANTS.items()), len(VARIANTS)):
                    progress(f"slow views, {clients} clients, {pool} connections, {name}")
                    ask = partial(_ask, place, f"Account {user.pk}", path)
                    ask(1)  # warms up
                    each = max(1, operations // 600)
                    with effects(clients * each):
                        _measure(loads[pool, path], [partial(ask, each)] * clients, process)
        tables.append(_table(f"{clients} clients of views that wait for {seconds:g} s", loads))
    return tables


def _ask(place: Path, authorization: str, path: str, times: int) -> list[float]:
    """One client. The seconds that each of its requests took."""
    latencies = []
    client = Client(place, authorization)
    try:
        for _ in range(times):
            start = time.perf_counter()
            client.post(path, Caller.new_key(), "{}")
            latencies.append(time.perf_counter() - start)
    finally:
        client.close()
    return latencies


def _measure(load: Load, clients: list[Callable[[], list[float]]], process: int) -> None:
    cpu, start = cpu_seconds(process), time.perf_counter()
    with ThreadPoolExecutor(len(clients)) as pool:
        futures = [pool.submit(client) for client in clients]
        while not all(future.done() for future in futures):
            load.threads = max(load.threads, len(list(Path("/proc", str(process), "task").iterdir())))
            load.connections = max(load.connections, sessions())
            load.in_transaction = max(load.in_transaction, sessions("idle in transaction"))
            time.sleep(LOOK_EVERY)
    for future in futures:
        load.latencies += future.result()
    load.rate = len(load.latencies) / (time.perf_counter() - start)
    load.cpu = (cpu_seconds(process) - cpu) / len(load.latencies)


def _table(title: str, loads: dict[tuple[int, str], Load]) -> Table:
    table = Table(
        title,
        (
            "",
            "connections allowed",
            "requests per second",
            "p50",
            "p95",
            "CPU",
            "threads",
            "connections",
            "in transaction",
        ),
        note="Threads and connections are the most that were seen at once; in transaction: idle in one.",
    )
    names = {path: name for name, path in VARIANTS.items()}
    for (pool, path), load in loads.items():
        table.add(
            names[path],
            str(pool),
            f"{load.rate:.0f}",
            milliseconds(statistics.median(load.latencies)),
            milliseconds(p95(load.latencies)),
            milliseconds(load.cpu),
            str(load.threads),
            str(load.connections),
            str(load.in_transaction),
        )
    return table
