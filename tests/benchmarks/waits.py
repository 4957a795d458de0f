"""Duplicates that wait until the first execution has ended: the package's ``Wait``, and other ways by hand.

The hand-written ways differ only in how they wait. What their first execution has to do for it counts, too.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from django.db import connection

from idempotency.operation import Operation
from idempotency.options.values import Wait
from idempotency.protocol.execution import FIRST_POLL, SLOWEST_POLL
from tests.concurrency.racing import PATIENCE, held

from . import views
from .crowd import GATE, Crowd, Gate, Gated
from .instruments import NANOSECONDS, p95, relative, round_trips, server_cpu, turns
from .report import Table, count, microseconds, milliseconds, times
from .requests import Caller, Variant, account, effects
from .views import execute, read, tables

DUPLICATES = 10
#: How long the first execution takes. Each time it takes up to a third more or less, because polls have a rhythm.
HANDLER_SECONDS = (0.03, 0.1, 0.3, 1.0)

WRITERS = 16
WRITE_ROUNDS = 5


class WaitingView(Gated, views.HandwrittenView):
    """Reads again after pauses as long as the package's."""

    def claim(self, scope: tuple[str, str], digest: str) -> tuple[int | None, Any]:
        won, found = super().claim(scope, digest)
        if won is None and not _is_completed(found):
            found = next(found for found in self.looks(scope) if _is_completed(found))
        return won, found

    def looks(self, scope: tuple[str, str]) -> Iterator[Any]:
        pause = FIRST_POLL
        while True:
            time.sleep(pause)  # the pause between two looks is what this view shows
            yield read(scope)
            pause = min(2 * pause, SLOWEST_POLL)


class LockingView(WaitingView):
    """The handler's transaction begins with an advisory lock, which the duplicate waits for in one statement.

    BEGIN and the lock are one message, unless the server binds parameters, which it does for single statements only.
    """

    LOCK = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))"
    AWAIT = f"""
    SELECT set_config('lock_timeout', '{PATIENCE}s', true), pg_advisory_xact_lock_shared(hashtextextended(%s, 0))
    """

    def work(self, request: Any) -> Any:
        key = request.META["HTTP_IDEMPOTENCY_KEY"]
        if connection.settings_dict["OPTIONS"].get("server_side_binding"):
            execute(self.LOCK, key)
        else:
            connection.connection.autocommit = True  # or psycopg would send its own BEGIN before
            execute(f"BEGIN; {self.LOCK}", key)
        return super().work(request)

    def looks(self, scope: tuple[str, str]) -> Iterator[Any]:
        while True:
            execute(self.AWAIT, scope[1])
            yield read(scope)
            time.sleep(FIRST_POLL)  # nothing reports that the first execution, which has its claim, has its lock


class NotifyingView(WaitingView):
    """The completing update notifies a channel of the key's own, to which the duplicate's session listens."""

    complete = f"{views.COMPLETE} RETURNING pg_notify('k' || idempotency_key, '')"

    def looks(self, scope: tuple[str, str]) -> Iterator[Any]:
        execute(f'LISTEN "k{scope[1]}"')
        try:
            while True:
                yield read(scope)  # at first as well, because the notification may have come before LISTEN
                list(connection.connection.notifies(timeout=1, stop_after=1))
        finally:
            execute(f'UNLISTEN "k{scope[1]}"')


class PackageView(Gated, views.PackageView):
    idempotent_operations: ClassVar = {"post": Operation("benchmarks.waits", in_progress=Wait(30))}


VARIANTS = (
    Variant("hand-written, reads again after pauses", WaitingView),
    Variant("hand-written, waits for an advisory lock", LockingView),
    Variant("hand-written, `LISTEN` and `NOTIFY`", NotifyingView),
    Variant("**this package**, `Wait`", PackageView),
)


@dataclass
class Waits:
    """What each duplicate of one variant needed."""

    delays: list[float] = field(default_factory=list)  # seconds from the end of the handler until the replay
    statements: list[int] = field(default_factory=list)
    client_cpu: list[float] = field(default_factory=list)
    server_cpu: list[float] = field(default_factory=list)


def compare(operations: int, seed: int, progress: Callable[[str], None]) -> list[Table]:
    """Let duplicates wait, a tenth of ``operations`` of each variant and for each duration of the handler."""
    lots = random.Random(seed)
    duplicates = min(DUPLICATES, operations)
    costs = {(variant, seconds): Waits() for seconds in HANDLER_SECONDS for variant in VARIANTS}
    rounds = max(1, operations // (10 * duplicates))
    with tables():
        caller = Caller(account())
        for variant in VARIANTS * 3:  # imports, caches, and prepared statements
            caller.calling(variant)()
        trips = {variant: round_trips(caller.calling(variant)) for variant in VARIANTS}
        with Crowd(duplicates) as crowd:
            for (variant, seconds), _ in turns("waits", costs, rounds, lots, progress, warm_ups=0):
                with effects(1):
                    _wait(crowd, caller, variant, seconds * lots.uniform(2 / 3, 4 / 3), costs[variant, seconds])
        return [_waits(f"{duplicates} duplicates wait", costs, trips), _notifications(operations, lots, progress)]


def _wait(crowd: Crowd, caller: Caller, variant: Variant, seconds: float, costs: Waits) -> None:
    gate, key = Gate(), caller.new_key()
    with held(caller.asking(variant, key, **{GATE: gate}), gate) as first:
        _, futures = crowd.rush([partial(_measured, caller.calling(variant, key), costs) for _ in range(crowd.size)])
        time.sleep(seconds)  # the handler takes this long: it ends with the block
    assert first.result() == 201
    # One whose claim came after the COMMIT had nothing to wait for.
    costs.delays += [future.result(PATIENCE) - gate.opened_at for future in futures]


def _measured(call: Callable[[], None], costs: Waits) -> float:
    """When the call was answered."""
    statements = 0

    def counting(execute: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal statements
        statements += 1
        return execute(*arguments)

    client, server = time.thread_time_ns(), server_cpu()
    with connection.execute_wrapper(counting):
        call()
    answered = time.perf_counter()
    costs.client_cpu.append((time.thread_time_ns() - client) / NANOSECONDS)
    if server is not None:
        costs.server_cpu.append(((server_cpu() or 0) - server) / NANOSECONDS)
    costs.statements.append(statements)
    return answered


def _is_completed(found: Any) -> bool:
    return bool(found[1] == "completed")


def _waits(title: str, costs: dict[tuple[Variant, float], Waits], trips: dict[Variant, int | None]) -> Table:
    table = Table(
        title,
        ("", "handler", "delay, p50", "p95", "statements", "CPU client", "CPU server", "first: round trips"),
        note="Of each duplicate, in the mean where it says no percentile. The delay is from the end of the "
        "handler, so with the first execution's own completion and COMMIT, until the duplicate has its replay.",
    )
    for (variant, seconds), waits in costs.items():
        table.add(
            variant.name,
            f"{seconds * 1e3:.0f} ms",
            milliseconds(statistics.median(waits.delays)),
            milliseconds(p95(waits.delays)),
            f"{statistics.mean(waits.statements):.1f}",
            microseconds(statistics.mean(waits.client_cpu)),
            microseconds(statistics.mean(waits.server_cpu) if waits.server_cpu else None),
            count(trips[variant]),
        )
    return table


def _notifications(operations: int, lots: random.Random, progress: Callable[[str], None]) -> Table:
    """What NOTIFY costs those who write at once, though nobody listens."""
    each = max(1, operations // WRITERS)
    ways = {"completing update": views.COMPLETE, "completing update and `NOTIFY`": NotifyingView.complete}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with Crowd(WRITERS) as crowd:
        for name, counts in turns("notifications", ways, WRITE_ROUNDS, lots, progress):
            started, futures = crowd.rush([partial(_write, ways[name], _claimed(each)) for _ in range(WRITERS)])
            ended = max(future.result(PATIENCE) for future in futures)
            if counts:
                rates[name].append(WRITERS * each / (ended - started))
    table = Table(
        f"{WRITERS} writers at once",
        ("", "COMMITs per second", ""),
        note="NOTIFY makes all transactions of a server that use it commit one after the other.",
    )
    base = rates["completing update"]
    for name, found in rates.items():
        table.add(name, f"{statistics.median(found):.0f}", times(relative(found, base)))
    return table


def _claimed(number: int) -> list[int]:
    """The ids of new claims."""
    claimed = []
    with connection.cursor() as cursor:
        for _ in range(number):
            cursor.execute(views.INSERT_WITHOUT_DISK, ("1", Caller.new_key(), views.DIGEST))
            claimed.append(cursor.fetchone()[0])
    return claimed


def _write(statement: str, claimed: list[int]) -> float:
    """When the last of the updates, each in autocommit, was committed."""
    with connection.cursor() as cursor:
        for number in claimed:
            cursor.execute(statement, ("{}", number))
    return time.perf_counter()
