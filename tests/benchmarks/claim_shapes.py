"""Claim and look: an insert and, for the loser, a second statement, or both in one.

The statements are the hand-written ones, so that only their shape differs. What a network adds is computed, as round
trips times its round-trip time: a proxy that delays would add its own scheduling to both sides of the comparison.
"""

from __future__ import annotations

import random
import statistics
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg
from django.db import connection

from . import views
from .instruments import preparing, round_trips, turns
from .report import Table, count, milliseconds

ROUND_TRIP_TIMES = (0.0, 0.0002, 0.0005, 0.001)  # seconds: this machine, one rack, one region, two
BLOCK = 20


@dataclass
class Shape:
    """A way to claim. Calling it claims ``key`` or, if it is taken, reads the record."""

    name: str
    one_statement: bool
    explicit: bool  # BEGIN and COMMIT of its own, or autocommit
    prepared: bool
    won: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    trips: dict[str, int | None] = field(default_factory=dict)

    def claim(self, cursor: Any, key: str) -> None:
        if self.explicit:
            cursor.execute("BEGIN")
        if self.one_statement:
            cursor.execute(views.INSERT_OR_READ, ("1", key, views.DIGEST, "1", key))
        else:
            cursor.execute(views.INSERT_WITHOUT_DISK, ("1", key, views.DIGEST))
        found = cursor.fetchone()
        if self.explicit:
            cursor.execute("COMMIT")
        if found is None:
            cursor.execute(views.READ, ("1", key))
            found = cursor.fetchone()
        assert found is not None

    def at(self, outcome: str, round_trip_time: float) -> float:
        local: float = statistics.median(getattr(self, outcome))
        return local + (self.trips[outcome] or 0) * round_trip_time


def compare(operations: int, seed: int, progress: Callable[[str], None]) -> list[Table]:
    shapes = [
        Shape(name, one_statement, explicit, prepared)
        for explicit in (True, False)
        for prepared in (False, True)
        for name, one_statement in (("insert, then read", False), ("one statement", True))
    ]
    rounds = max(1, operations // BLOCK)
    with views.tables(), preparing() as prepared, psycopg.ClientCursor(connection.connection) as plain:
        for shape, counts in turns("claims", shapes, rounds, random.Random(seed), progress):
            _measure(shape, prepared if shape.prepared else plain, keep=counts)
    return [_latencies(shapes), _break_even(shapes)]


def _measure(shape: Shape, cursor: Any, *, keep: bool) -> None:
    keys = [str(uuid.uuid4()) for _ in range(BLOCK)]
    for outcome in ("won", "lost"):
        times: list[float] = getattr(shape, outcome)
        for key in keys:
            start = time.perf_counter()
            shape.claim(cursor, key)
            if keep:
                times.append(time.perf_counter() - start)
        if not keep:
            key = str(uuid.uuid4()) if outcome == "won" else keys[0]
            shape.trips[outcome] = round_trips(partial(shape.claim, cursor, key))


def _latencies(shapes: list[Shape]) -> Table:
    headings = [f"{outcome}, +{rtt * 1e3:g} ms" for outcome in ("won", "lost") for rtt in ROUND_TRIP_TIMES]
    table = Table(
        "Claim: one statement or two",
        ("claim", "transaction", "prepared", "round trips, won", "lost", *headings),
        note="Medians, as measured over a local socket and as computed for a network with the given round-trip time.",
    )
    for shape in shapes:
        table.add(
            shape.name,
            "`BEGIN`, `COMMIT`" if shape.explicit else "autocommit",
            "yes" if shape.prepared else "no",
            count(shape.trips["won"]),
            count(shape.trips["lost"]),
            *(milliseconds(shape.at(outcome, rtt)) for outcome in ("won", "lost") for rtt in ROUND_TRIP_TIMES),
        )
    return table


def _break_even(shapes: list[Shape]) -> Table:
    """From which share of retries among all requests the one statement is the cheaper one."""
    table = Table(
        "Share of retries from which one statement pays",
        ("transaction", "prepared", *(f"+{rtt * 1e3:g} ms" for rtt in ROUND_TRIP_TIMES)),
    )
    for two, one in zip(shapes[::2], shapes[1::2], strict=True):
        cells = []
        for rtt in ROUND_TRIP_TIMES:
            loss = one.at("won", rtt) - two.at("won", rtt)
            gain = two.at("lost", rtt) - one.at("lost", rtt)
            cells.append("always" if loss <= 0 < gain else "never" if gain <= 0 else f"{loss / (loss + gain):.0%}")
        table.add("`BEGIN`, `COMMIT`" if two.explicit else "autocommit", "yes" if two.prepared else "no", *cells)
    return table
