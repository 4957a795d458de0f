"""First executions and replays over a network: through a proxy that delays each message of the client."""

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

from . import views
from .instruments import Cost, measure_block, relative, round_trips
from .report import Table, count, milliseconds, times
from .requests import BASELINE, BLOCK, PACKAGE, Caller, Variant, account, effects, tables

#: In seconds: nothing added, one rack, one region, two.
DELAYS = (0.0, 0.0002, 0.0005, 0.001)
FIRST_EXECUTIONS = (
    Variant("bare view, own `atomic()`", views.BareAtomicView),
    BASELINE,
    PACKAGE,
    Variant("this package, view has its own `atomic()`", views.PackageAtomicView),
)
REPLAYS = (BASELINE, PACKAGE)


@contextmanager
def delaying_proxy() -> Iterator[Proxy]:
    """Django's connection goes through the proxy during the block."""
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
    lots = random.Random(seed)
    first = {(variant, delay): Cost() for variant in FIRST_EXECUTIONS for delay in DELAYS}
    replayed = {(variant, delay): Cost() for variant in REPLAYS for delay in DELAYS}
    trips = {delay: list[float]() for delay in DELAYS}
    rounds = max(1, operations // BLOCK)
    with tables(), delaying_proxy() as proxy:
        caller = Caller(account())
        keys = {variant: [caller.new_key() for _ in range(BLOCK + 1)] for variant in REPLAYS}
        for variant in FIRST_EXECUTIONS * 2:  # imports, caches, and prepared statements
            for key in keys.get(variant, [caller.new_key()]):
                caller.calling(variant, key)()
        for number in range(rounds):
            progress(f"latency, round {number + 1} of {rounds}")
            for delay in lots.sample(DELAYS, len(DELAYS)):
                proxy.delay = delay
                trips[delay].append(_one_round_trip())
                for variant in lots.sample(FIRST_EXECUTIONS, len(FIRST_EXECUTIONS)):
                    with effects(BLOCK + 1):
                        measure_block(first[variant, delay], [caller.calling(variant) for _ in range(BLOCK + 1)])
                for variant in lots.sample(REPLAYS, len(REPLAYS)):
                    with effects(0):
                        measure_block(replayed[variant, delay], [caller.calling(variant, key) for key in keys[variant]])
        proxy.delay = 0.0
        for variant in FIRST_EXECUTIONS:
            first[variant, 0.0].round_trips = round_trips(caller.calling(variant))
        for variant in REPLAYS:
            replayed[variant, 0.0].round_trips = round_trips(caller.calling(variant, keys[variant][0]))
    return [
        _table("First execution over a network", first, trips),
        _table("Replay over a network", replayed, trips),
    ]


def _one_round_trip() -> float:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        start = time.perf_counter()
        cursor.execute("SELECT 1")
        return time.perf_counter() - start


def _table(title: str, costs: dict[tuple[Variant, float], Cost], trips: dict[float, list[float]]) -> Table:
    headings = [heading for delay in DELAYS for heading in (f"+{delay * 1e3:g} ms", "")]
    table = Table(
        title,
        ("", "round trips", *headings),
        note="Medians. × is relative to the row `hand-written`. The last row is one round trip through the proxy.",
    )
    for variant in dict.fromkeys(variant for variant, _ in costs):
        cells = []
        for delay in DELAYS:
            cost, base = costs[variant, delay], costs[BASELINE, delay]
            cells += [milliseconds(cost.median), times(relative(cost.block_seconds, base.block_seconds))]
        table.add(variant.name, count(costs[variant, 0.0].round_trips), *cells)
    one = [cell for delay in DELAYS for cell in (milliseconds(statistics.median(trips[delay])), "")]
    table.add("`SELECT 1`", "1", *one)
    return table
