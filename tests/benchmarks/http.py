"""Requests per second behind a real server, with a few clients that ask without a pause."""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from django.contrib.auth.models import User
from rest_framework.authtoken.models import Token

from .instruments import relative
from .report import Table, times
from .requests import BODY, Caller, effects, tables
from .service.serving import Client, serving

CLIENTS = 4
#: Requests in a round of one variant.
BLOCK = 40
SERVERS = {"gunicorn, 2 sync workers": "gunicorn", "uvicorn, 1 process": "uvicorn"}
#: Their addresses. The package's is protected.
VARIANTS = {"bare view, own `atomic()`": "/bare/", "hand-written": "/handwritten/", "**this package**": "/package/"}
BARE, HANDWRITTEN = "/bare/", "/handwritten/"


@dataclass
class Rates:
    """Requests per second, one entry a round."""

    first: list[float] = field(default_factory=list)
    repeated: list[float] = field(default_factory=list)


def compare(operations: int, seed: int, progress: Callable[[str], None]) -> list[Table]:
    """Let each variant execute ``operations`` requests at each server, and repeat as many."""
    with tables():
        user = User.objects.create_user("benchmark")
        authorization = f"Token {Token.objects.create(user=user)}"
        return [
            _compare_at(server, title, authorization, operations, random.Random(seed), progress)
            for title, server in SERVERS.items()
        ]


def _compare_at(
    server: str, title: str, authorization: str, operations: int, lots: random.Random, progress: Callable[[str], None]
) -> Table:
    rates = {path: Rates() for path in VARIANTS.values()}
    block = min(BLOCK, operations)
    rounds = max(1, operations // block)
    with serving(server, BENCHMARK_POOL="0" if server == "gunicorn" else str(2 * CLIENTS)) as (place, _):
        clients = [Client(place, authorization) for _ in range(CLIENTS)]
        try:
            for number in range(-1, rounds):  # the first one warms up
                progress(f"http, {server}, round {number + 1} of {rounds}")
                for path in lots.sample(list(rates), len(rates)):
                    keys = [Caller.new_key() for _ in range(block)]
                    with effects(block):
                        first = rate(clients, path, keys)
                    with effects(block if path == BARE else 0):
                        repeated = rate(clients, path, keys)
                    if number >= 0:
                        rates[path].first.append(first)
                        rates[path].repeated.append(repeated)
        finally:
            for client in clients:
                client.close()
    return _table(title, rates)


def rate(clients: list[Client], path: str, keys: list[str]) -> float:
    """Requests per second, when the clients ask for all keys as fast as they are answered."""
    body, left, lock = json.dumps(BODY), iter(keys), threading.Lock()

    def ask(client: Client) -> None:
        while True:
            with lock:
                key = next(left, None)
            if key is None:
                return
            client.post(path, key, body)

    with ThreadPoolExecutor(len(clients)) as pool:
        start = time.perf_counter()
        list(pool.map(ask, clients))
        return len(keys) / (time.perf_counter() - start)


def _table(title: str, rates: dict[str, Rates]) -> Table:
    table = Table(
        f"Requests per second: {title}",
        ("", "first", "× bare", "× hand-written", "again", "× bare", "× hand-written"),
        note="Again: the same requests with the same keys, which the bare view executes again. More is better.",
    )
    for name, path in VARIANTS.items():
        mine, cells = rates[path], list[str]()
        for phase in ("first", "repeated"):
            found: list[float] = getattr(mine, phase)
            cells.append(f"{statistics.median(found):.0f}")
            cells += [times(relative(found, getattr(rates[base], phase))) for base in (BARE, HANDWRITTEN)]
        table.add(name, *cells)
    return table
