"""Fifty duplicates of one request at once: while the first one runs, and when it has ended."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import ClassVar

from tests.concurrency.racing import held

from . import views
from .crowd import GATE, Crowd, Gate, Gated
from .instruments import p95, relative, turns
from .report import Table, milliseconds, times
from .requests import Caller, Variant, account, effects
from .views import tables

DUPLICATES = 50


class HandwrittenView(Gated, views.HandwrittenView):
    """Hand-written."""


class HandwrittenOneStatementView(Gated, views.HandwrittenOneStatementView):
    """Claim and read in one statement."""


class PackageView(Gated, views.PackageView):
    idempotent_operations: ClassVar = {"post": "benchmarks.storm"}


BASELINE = Variant("hand-written", HandwrittenView)
VARIANTS = (
    BASELINE,
    Variant("hand-written, claim and read in one statement", HandwrittenOneStatementView),
    Variant("**this package**", PackageView),
)


#: For each storm the seconds from its start until each duplicate has its answer.
Storms = list[list[float]]


def compare(operations: int, seed: int, progress: Callable[[str], None]) -> list[Table]:
    """Let ``operations`` duplicates of each variant run, in storms in random order."""
    lots = random.Random(seed)
    duplicates = min(DUPLICATES, operations)
    refused: dict[Variant, Storms] = {variant: [] for variant in VARIANTS}
    replayed: dict[Variant, Storms] = {variant: [] for variant in VARIANTS}
    rounds = max(1, operations // duplicates)
    with tables(), Crowd(duplicates) as crowd:
        caller = Caller(account())
        for variant, counts in turns("storm", VARIANTS, rounds, lots, progress):
            with effects(1):
                while_it_runs, afterwards = _storm(crowd, caller, variant)
            if counts:
                refused[variant].append(while_it_runs)
                replayed[variant].append(afterwards)
    return [_table(f"{duplicates} duplicates at once", refused, replayed)]


def _storm(crowd: Crowd, caller: Caller, variant: Variant) -> tuple[list[float], list[float]]:
    gate, key = Gate(), caller.new_key()
    with held(caller.asking(variant, key, **{GATE: gate}), gate) as first:
        refused = _answers(crowd, caller, variant, key, status=409)
    assert first.result() == 201
    return refused, _answers(crowd, caller, variant, key, status=201)


def _answers(crowd: Crowd, caller: Caller, variant: Variant, key: str, *, status: int) -> list[float]:
    """Seconds until each duplicate had its answer."""
    calls = [partial(_timed, caller.asking(variant, key)) for _ in range(crowd.size)]
    started, futures = crowd.rush(calls)
    answered = [future.result() for future in futures]
    assert {given for given, _ in answered} == {status}
    return [at - started for _, at in answered]


def _timed(ask: Callable[[], int]) -> tuple[int, float]:
    return ask(), time.perf_counter()


def _table(title: str, refused: dict[Variant, Storms], replayed: dict[Variant, Storms]) -> Table:
    table = Table(
        title,
        ("", "409, p50", "p50", "409, p95", "p95", "replay, p50", "p50", "replay, p95", "p95"),
        note="From the start of all until a duplicate has its answer. × is relative to the row `hand-written`.",
    )
    for variant in VARIANTS:
        cells = []
        for answers in (refused, replayed):
            mine, base = answers[variant], answers[BASELINE]
            for figure in (statistics.median, p95):
                cells.append(milliseconds(figure(list(chain(*mine)))))
                cells.append(times(relative(list(map(figure, mine)), list(map(figure, base)))))
        table.add(variant.name, *cells)
    return table
