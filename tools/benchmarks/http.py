"""Requests per second through a real server, with a few clients that send requests without pauses."""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from rest_framework.authtoken.models import Token

from .instruments import relative, turns
from .report import Table, milliseconds, times
from .requests import BARE_ATOMIC, BASELINE, BODY, PACKAGE, PROMISES, Caller, account, effects
from .service.serving import Client, cpu_seconds, serving
from .views import tables

CLIENTS = 4
#: Requests of one variant in a round.
BLOCK = 20
SERVERS = {"gunicorn, 2 sync workers": "gunicorn", "uvicorn, 1 process": "uvicorn"}
BARE, PROMISING = "/bare/", "/promises/"
VARIANTS = {
    BARE_ATOMIC.name: BARE,
    BASELINE.name: "/handwritten/",
    PROMISES.name: PROMISING,
    PACKAGE.name: "/package/",
}


@dataclass
class Load:
    """For each round, the requests per second and the server's CPU seconds per request."""

    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def compare(operations: int, seed: int, progress: Callable[[str], None]) -> list[Table]:
    """Measure ``operations`` first requests and as many repeated ones, for each variant on each server."""
    with tables():
        user = account()
        authorization = f"Token {Token.objects.get_or_create(user=user)[0]}"
        return [
            _compare_at(server, title, authorization, operations, random.Random(seed), progress)
            for title, server in SERVERS.items()
        ]


def _compare_at(
    server: str, title: str, authorization: str, operations: int, lots: random.Random, progress: Callable[[str], None]
) -> Table:
    loads = {path: (Load(), Load()) for path in VARIANTS.values()}
    block = min(BLOCK, operations)
    rounds = max(1, operations // block)
    with (
        serving(server, BENCHMARK_POOL="0" if server == "gunicorn" else str(2 * CLIENTS)) as (place, process),
        ExitStack() as stack,
    ):
        clients = [stack.enter_context(closing(Client(place, authorization))) for _ in range(CLIENTS)]
        for path, counts in turns(f"http, {server}", loads, rounds, lots, progress):
            keys = [Caller.new_key() for _ in range(block)]
            for load, expected in zip(loads[path], (block, block if path == BARE else 0), strict=True):
                with effects(expected):
                    before = cpu_seconds(process)
                    rate = _rate(clients, path, keys)
                    cpu = cpu_seconds(process) - before
                if counts:
                    load.rates.append(rate)
                    load.cpu.append(cpu / block)
    return _table(title, loads)


def _rate(clients: list[Client], path: str, keys: list[str]) -> float:
    """Requests per second while the clients send each key once, without pauses."""
    body, left, lock = json.dumps(BODY), iter(keys), threading.Lock()

    def send(client: Client) -> None:
        while True:
            with lock:
                key = next(left, None)
            if key is None:
                return
            client.post(path, key, body)

    with ThreadPoolExecutor(len(clients)) as pool:
        start = time.perf_counter()
        list(pool.map(send, clients))
        return len(keys) / (time.perf_counter() - start)


def _table(title: str, loads: dict[str, tuple[Load, Load]]) -> Table:
    table = Table(
        f"Requests per second: {title}",
        ("", "", "requests per second", "× bare", "× promises", "CPU", "× promises"),
        note=f"Again: the same requests with the same keys, which the bare view executes again. CPU is the web "
        f"server's mean CPU time per request. × promises is relative to the row `{PROMISES.name}`.",
    )
    for phase, heading in enumerate(("first", "again")):
        bare, written = loads[BARE][phase], loads[PROMISING][phase]
        base = statistics.mean(written.cpu)
        for name, path in VARIANTS.items():
            load = loads[path][phase]
            cpu = statistics.mean(load.cpu)
            table.add(
                name,
                heading,
                f"{statistics.median(load.rates):.0f}",
                times(relative(load.rates, bare.rates)),
                times(relative(load.rates, written.rates)),
                milliseconds(cpu),
                times(cpu / base if base else None),
            )
    return table
