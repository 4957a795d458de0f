"""Async views that wait, many of them at once: throughput, latency, threads and connections.

Each client has a thread here, and asks one thing after the other. The server is one uvicorn process.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from .instruments import p95, turns
from .report import Table, milliseconds
from .requests import Caller, account, effects
from .service.serving import Client, cpu_seconds, serving, sessions

#: How many clients, and for how many seconds a view waits. The first load asks for more than one process can do, the
#: second for less.
LOADS = ((200, 0.5), (100, 2.0))
#: How many connections the server's pool may open: few, or one for each request.
POOLS = (20, 200)
LOOK_EVERY = 0.05  # seconds
SEEN = ("threads", "connections", "in transaction")
VARIANTS = {
    "bare view": "/slow/bare/",
    "bare view, queries before it waits": "/slow/bare/query-first/",
    "**this package**": "/slow/package/",
    "**this package**, queries before it waits": "/slow/package/query-first/",
    "the same with `transaction=False`": "/slow/package/autocommit/",
}


@dataclass
class Load:
    """What one variant needed with one size of the pool."""

    latencies: list[float] = field(default_factory=list)  # seconds
    rates: list[float] = field(default_factory=list)  # requests per second, one entry a round
    cpu: float = 0.0  # seconds of the server, for all of them
    most: Counter[str] = field(default_factory=Counter)  # that was seen at once


def compare(operations: int, seed: int, progress: Callable[[str], None]) -> list[Table]:
    """Let each client ask once for every 200 ``operations``, under each load and at each size of the pool."""
    user = account()
    lots, tables = random.Random(seed), []
    for clients, seconds in LOADS:
        loads = {(pool, path): Load() for pool in POOLS for path in VARIANTS.values()}
        for pool in POOLS:
            with serving("uvicorn", BENCHMARK_POOL=str(pool), BENCHMARK_SLOW_SECONDS=str(seconds)) as (place, process):
                what, rounds = f"slow views, {clients} clients, {pool} connections", max(1, operations // 200)
                for path, _ in turns(what, VARIANTS.values(), rounds, lots, progress, warm_ups=0):
                    ask = partial(_ask, place, f"Account {user.pk}", path)
                    ask()  # warms up
                    with effects(clients):
                        _measure(loads[pool, path], [ask] * clients, process)
        tables.append(_table(f"{clients} clients of views that wait for {seconds:g} s", loads))
    return tables


def _ask(place: Path, authorization: str, path: str) -> float:
    """The seconds that a request took."""
    with closing(Client(place, authorization)) as client:
        start = time.perf_counter()
        client.post(path, Caller.new_key(), "{}")
        return time.perf_counter() - start


def _measure(load: Load, requests: list[Callable[[], float]], process: int) -> None:
    cpu, start = cpu_seconds(process), time.perf_counter()
    with ThreadPoolExecutor(len(requests)) as pool:
        futures = [pool.submit(request) for request in requests]
        while wait(futures, LOOK_EVERY).not_done:
            threads = len(list(Path("/proc", str(process), "task").iterdir()))
            # The union of two counters has the higher count of each.
            load.most |= dict(zip(SEEN, (threads, sessions(), sessions("idle in transaction")), strict=True))
    load.latencies += [future.result() for future in futures]
    load.rates.append(len(futures) / (time.perf_counter() - start))
    load.cpu += cpu_seconds(process) - cpu


def _table(title: str, loads: dict[tuple[int, str], Load]) -> Table:
    table = Table(
        title,
        ("", "connections allowed", "requests per second", "p50", "p95", "CPU", *SEEN),
        note="Threads and connections are the most that were seen at once; in transaction: idle in one.",
    )
    names = {path: name for name, path in VARIANTS.items()}
    for (pool, path), load in loads.items():
        table.add(
            names[path],
            str(pool),
            f"{statistics.median(load.rates):.0f}",
            milliseconds(statistics.median(load.latencies)),
            milliseconds(p95(load.latencies)),
            milliseconds(load.cpu / len(load.latencies)),
            *(str(load.most[name]) for name in SEEN),
        )
    return table
