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
from rest_framework.authtoken.models import Token

from .report import Table, milliseconds
from .requests import Caller, effects
from .service.serving import Client, others, serving
from .storm import p95

#: How many clients, and for how many seconds a view waits. The first load asks for more than one process can do, the
#: second for less.
LOADS = ((200, 0.5), (100, 2.0))
#: How many connections the server's pool may open: few, or one for each request.
POOLS = (20, 200)
LOOK_EVERY = 0.05  # seconds
#: The name, the address, and whether a token is looked up in the database before.
VARIANTS = (
    ("bare view", "/slow/bare/", False),
    ("bare view, after a query", "/slow/bare/after-a-query/", True),
    ("**this package**", "/slow/package/", False),
    ("**this package**, after a query", "/slow/package/after-a-query/", True),
    ("this package, `transaction=False`", "/slow/package/autocommit/", False),
)


@dataclass
class Load:
    """What one variant needed with one size of the pool. The needs are the highest that were seen."""

    latencies: list[float] = field(default_factory=list)  # seconds
    rates: list[float] = field(default_factory=list)  # requests per second
    threads: int = 0
    connections: int = 0
    in_transaction: int = 0


def compare(operations: int, seed: int, progress: Callable[[str], None]) -> list[Table]:
    """Let ``operations`` requests of each variant run under each load and at each size of the pool."""
    user = User.objects.create_user("benchmark")
    token = Token.objects.create(user=user)
    lots, tables = random.Random(seed), []
    for clients, seconds in LOADS:
        loads = {(pool, path): Load() for pool in POOLS for _, path, _ in VARIANTS}
        for pool in POOLS:
            with serving("uvicorn", BENCHMARK_POOL=str(pool), BENCHMARK_SLOW_SECONDS=str(seconds)) as (place, process):
                for name, path, has_token in lots.sample(VARIANTS, len(VARIANTS)):
                    progress(f"slow views, {clients} clients, {pool} connections, {name}")
                    authorization = f"Token {token}" if has_token else f"Account {user.pk}"
                    _ask(1, Client(place, authorization), path)  # warms up
                    each = max(1, operations // clients)
                    with effects(clients * each):
                        _measure(loads[pool, path], clients, each, place, authorization, path, process)
        tables.append(_table(f"{clients} clients of views that wait for {seconds:g} s", loads))
    return tables


def _ask(times: int, client: Client, path: str) -> list[float]:
    """The seconds that each of the requests took."""
    latencies = []
    try:
        for _ in range(times):
            start = time.perf_counter()
            client.post(path, Caller.new_key(), "{}")
            latencies.append(time.perf_counter() - start)
    finally:
        client.close()
    return latencies


def _measure(load: Load, clients: int, each: int, place: Path, authorization: str, path: str, process: int) -> None:
    with ThreadPoolExecutor(clients) as pool:
        start = time.perf_counter()
        futures = [pool.submit(partial(_ask, each, Client(place, authorization), path)) for _ in range(clients)]
        while not all(future.done() for future in futures):
            load.threads = max(load.threads, len(list(Path("/proc", str(process), "task").iterdir())))
            load.connections = max(load.connections, others())
            load.in_transaction = max(load.in_transaction, others("idle in transaction"))
            time.sleep(LOOK_EVERY)
        load.rates.append(clients * each / (time.perf_counter() - start))
    for future in futures:
        load.latencies += future.result()


def _table(title: str, loads: dict[tuple[int, str], Load]) -> Table:
    table = Table(
        title,
        ("", "connections allowed", "requests per second", "p50", "p95", "threads", "connections", "in transaction"),
        note="Threads and connections are the most that were seen at once; in transaction: idle in one.",
    )
    names = {path: name for name, path, _ in VARIANTS}
    for (pool, path), load in loads.items():
        table.add(
            names[path],
            str(pool),
            f"{statistics.median(load.rates):.0f}",
            milliseconds(statistics.median(load.latencies)),
            milliseconds(p95(load.latencies)),
            str(load.threads),
            str(load.connections),
            str(load.in_transaction),
        )
    return table
