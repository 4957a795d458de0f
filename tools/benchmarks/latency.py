"""First executions and replays over a network, simulated by a proxy that delays each of the client's messages."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs, urlsplit

from django.db import connection

from tests.harness.proxy import Proxy

from .instruments import Cost, relative
from .report import Table, count, milliseconds, times
from .requests import BARE_ATOMIC, BASELINE, BLOCK, PACKAGE, PACKAGE_ATOMIC, PROMISES, Costs, Variant
from .views import tables

#: In seconds: no delay, and typical for one rack, one region and two regions.
DELAYS = (0.0, 0.0002, 0.0005, 0.001)
FIRST_EXECUTIONS = (BARE_ATOMIC, BASELINE, PROMISES, PACKAGE, PACKAGE_ATOMIC)
REPLAYS = (BASELINE, PROMISES, PACKAGE)


@contextmanager
def delaying_proxy() -> Iterator[Proxy]:
    """Route Django's connection through the proxy during the block."""
    settings = connection.settings_dict
    direct = {name: settings[name] for name in ("HOST", "PORT")}
    with Proxy(os.environ["DATABASE_URL"]) as proxy:
        connection.close()
        through = urlsplit(proxy.url)
        (directory,) = parse_qs(through.query).get("host", [""])
        settings.update(HOST=directory or through.hostname, PORT=through.port or "")
        try:
            yield proxy
        finally:
            connection.close()
            settings.update(direct)


def compare(operations: int, seed: int, progress: Callable[[str], None]) -> list[Table]:
    """Measure every variant ``operations`` times at each delay, in blocks in random order."""
    lots, rounds = random.Random(seed), max(1, operations // BLOCK)
    trips = {delay: list[float]() for delay in DELAYS}
    with tables(), delaying_proxy() as proxy:
        costs = {delay: Costs(FIRST_EXECUTIONS, REPLAYS) for delay in DELAYS}
        costs[0.0].count_round_trips()
        for number in range(rounds):
            progress(f"latency, round {number + 1} of {rounds}")
            for delay in lots.sample(DELAYS, len(DELAYS)):
                proxy.delay = delay
                trips[delay].append(_one_round_trip())
                costs[delay].measure(lots)
    return [
        _table("First execution over a network", {delay: cost.first for delay, cost in costs.items()}, trips),
        _table("Replay over a network", {delay: cost.replayed for delay, cost in costs.items()}, trips),
    ]


def _one_round_trip() -> float:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        start = time.perf_counter()
        cursor.execute("SELECT 1")
        return time.perf_counter() - start


def _table(title: str, costs: dict[float, dict[Variant, Cost]], trips: dict[float, list[float]]) -> Table:
    headings = [heading for delay in DELAYS for heading in (f"+{delay * 1e3:g} ms", "")]
    table = Table(
        title,
        ("", "round trips", *headings),
        note=f"Medians. × is relative to the row `{PROMISES.name}`. The last row is one round trip through the proxy.",
    )
    for variant, without_delay in costs[0.0].items():
        cells = []
        for cost in costs.values():
            base = cost[PROMISES].block_seconds
            cells.append(milliseconds(statistics.median(cost[variant].seconds)))
            cells.append(times(relative(cost[variant].block_seconds, base)))
        table.add(variant.name, count(without_delay.round_trips), *cells)
    one = [cell for delay in DELAYS for cell in (milliseconds(statistics.median(trips[delay])), "")]
    table.add("`SELECT 1`", "1", *one)
    return table
