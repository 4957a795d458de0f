"""Fifty simultaneous duplicates in threads of one process: the time until their 409, and until their replay."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar

from django.db import connection

from idempotency.contrib.rest_framework import IdempotentMixin

from . import views
from .instruments import relative, turns
from .report import Table, milliseconds, times
from .requests import BASELINE, PACKAGE, PROMISES, Caller, Variant, account, effects

DUPLICATES = 50
WAIT_LIMIT = 60.0  # seconds


class Held:
    """Keeps the operation running until the duplicates have been answered."""

    entered, may_end = threading.Event(), threading.Event()

    def work(self, request: Any) -> Any:
        self.entered.set()
        assert self.may_end.wait(WAIT_LIMIT)
        return super().work(request)  # type: ignore[misc]


class HeldHandwrittenView(Held, views.HandwrittenView):
    pass


class HeldPromisesView(Held, views.HandwrittenPromisesView):
    pass


class HeldPackageView(IdempotentMixin, Held, views.BareView):
    idempotent_operations: ClassVar = {"post": "benchmarks.storm"}


VARIANTS = (
    Variant(BASELINE.name, HeldHandwrittenView),
    Variant(PROMISES.name, HeldPromisesView),
    Variant(PACKAGE.name, HeldPackageView),
)


def compare(operations: int, seed: int, progress: Callable[[str], None]) -> list[Table]:
    """Send duplicates of ``operations / 50`` requests of each variant while the request runs, and again afterwards."""
    rounds, lots = max(1, operations // DUPLICATES), random.Random(seed)
    refused = {variant: list[float]() for variant in VARIANTS}
    replayed = {variant: list[float]() for variant in VARIANTS}
    with views.tables(), _threads(DUPLICATES + 1) as pool:
        caller = Caller(account())
        for variant, counts in turns("storm", VARIANTS, rounds, lots, progress):
            key = Caller.new_key()
            with effects(1):
                Held.entered.clear()
                Held.may_end.clear()
                first = pool.submit(caller.calling(variant, key))
                assert Held.entered.wait(WAIT_LIMIT)
                times_refused = _median_of_storm(pool, caller, variant, key, 409)
                Held.may_end.set()
                first.result(WAIT_LIMIT)
                times_replayed = _median_of_storm(pool, caller, variant, key, 201)
            if counts:
                refused[variant].append(times_refused)
                replayed[variant].append(times_replayed)
    table = Table(
        f"{DUPLICATES} duplicates at once",
        ("", "409, median", "×", "replay, median", "×"),
        note=f"× is relative to the row `{PROMISES.name}`.",
    )
    base = VARIANTS[1]
    for variant in VARIANTS:
        cells = []
        for seconds in (refused, replayed):
            cells += [
                milliseconds(statistics.median(seconds[variant])),
                times(relative(seconds[variant], seconds[base])),
            ]
        table.add(variant.name, *cells)
    return [table]


def _median_of_storm(pool: ThreadPoolExecutor, caller: Caller, variant: Variant, key: str, status: int) -> float:
    """The median time until a duplicate is answered, in seconds."""
    barrier = threading.Barrier(DUPLICATES)

    def measure(call: Callable[[], None]) -> float:
        barrier.wait(WAIT_LIMIT)
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    calls = [caller.calling(variant, key, status) for _ in range(DUPLICATES)]
    return statistics.median(pool.map(measure, calls))


@contextmanager
def _threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of ``number`` threads, each with an open database connection."""
    together = threading.Barrier(number)

    def connect(_: int) -> None:
        connection.ensure_connection()
        together.wait(WAIT_LIMIT)

    def disconnect(_: int) -> None:
        together.wait(WAIT_LIMIT)
        connection.close()

    with ThreadPoolExecutor(number) as pool:
        list(pool.map(connect, range(number)))
        try:
            yield pool
        finally:
            list(pool.map(disconnect, range(number)))
