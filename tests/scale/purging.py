"""The purge of a large table: its speed, what claims notice of it, its log, and what it leaves in the indexes."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import NamedTuple, cast

from django.db import connection

from idempotency.upkeep.retention import DEFAULT_BATCH_SIZE, purge_batches
from tests.benchmarks.instruments import NANOSECONDS, relative, server_cpu
from tests.benchmarks.report import Table, bytes_of, milliseconds, times

from .claimants import Claimants, Timed
from .filling import DUE, TABLE, fill, fill_to, refill, settle
from .growth import megabytes
from .metering import sizes, written

#: In a round each variant purges a fiftieth of the table, and as many records are added that are due.
ROUNDS = 12
SHARES = 50
VACUUM_AFTER = 4  # rounds
PLAIN = "one DELETE"


class Pace(NamedTuple):
    """How the package purges."""

    batch_size: int
    jobs: int = 1
    pause: float = 0.0  # seconds

    def __str__(self) -> str:
        options = [f"batches of {self.batch_size:,}"]
        options += [f"--jobs {self.jobs}"] * (self.jobs > 1)
        options += [f"--pause {self.pause}"] * (self.pause > 0)
        return ", ".join(options)


PACES = (Pace(1000), Pace(5000), Pace(10_000), Pace(5000, jobs=2), Pace(1000, pause=0.05), Pace(5000, pause=0.1))
#: A purge that pauses gets this part of a share, because it takes so much longer.
PAUSED_PART = 10
IDLE = "idle"
IDLE_SECONDS = 5.0
#: One session computes, and reads and locks nothing. What claims notice of that is the machine's share in the rest.
BUSY = "a busy session"
BUSY_ROWS = 10_000_000
#: A cycle purges a tenth of the table, vacuums, and claims and completes as many records.
CYCLES = 3
PURGED = 10

DELETE = f"DELETE FROM {TABLE} WHERE expires_at <= %s AND status IN ('completed', 'recoverable')"
NTH_DUE = f"SELECT expires_at FROM {TABLE} ORDER BY expires_at OFFSET %s LIMIT 1"


class Span(NamedTuple):
    """When something ran, of ``time.monotonic()``."""

    start: float
    end: float


@dataclass
class Phase:
    """What one variant did, with an entry for each time it ran."""

    rows: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    log: list[int] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # seconds of the server, in this connection

    @property
    def rates(self) -> list[float]:
        return [rows / (span.end - span.start) for rows, span in zip(self.rows, self.spans, strict=True)]

    @property
    def cpu_rates(self) -> list[float]:
        return [rows / cpu for rows, cpu in zip(self.rows, self.cpu, strict=True)]


def compare(rows: int, seed: int, progress: Callable[[str], None]) -> list[Table]:
    fill_to(rows, progress)
    share = rows // SHARES
    variants: dict[str, Callable[[datetime], int]] = {PLAIN: delete}
    variants |= {str(pace): partial(_purge, share // PAUSED_PART if pace.pause else share, pace) for pace in PACES}
    phases = {name: Phase() for name in (IDLE, BUSY, *variants, *_MAINTENANCE)}
    lots = random.Random(seed)
    with Claimants(str(connection.settings_dict["NAME"])) as claimants:
        for number in range(ROUNDS):
            progress(f"purge: round {number + 1}")
            if number and number % VACUUM_AFTER == 0:
                settle()
            _purge_by_each(variants, share, phases, lots)
            with connection.cursor() as cursor:
                due, purged = int(rows * DUE), sum(phases[name].rows[-1] for name in variants)
                fill(cursor, TABLE, due - purged, due, rows, progress)
        settle()
        left = _cycles(rows, phases, progress)
    return [_speed(phases, claimants), _maintenance(phases, claimants), left]


def _purge_by_each(
    variants: dict[str, Callable[[datetime], int]], share: int, phases: dict[str, Phase], lots: random.Random
) -> None:
    _checkpoint()
    with _measured(phases[IDLE]):
        time.sleep(IDLE_SECONDS)
    with _measured(phases[BUSY]), connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM generate_series(1, %s)", [BUSY_ROWS])
    for name in lots.sample(list(variants), len(variants)):
        last = nth_due(share)
        _checkpoint()
        with _measured(phases[name]):
            phases[name].rows.append(variants[name](last))


def _cycles(rows: int, phases: dict[str, Phase], progress: Callable[[str], None]) -> Table:
    left = Table("Sizes after cycles of purge, vacuum and refill", ("", *sizes(TABLE)))
    left.add("before", *map(megabytes, sizes(TABLE).values()))
    for cycle in range(CYCLES):
        progress(f"purge: cycle {cycle + 1}")
        _purge(rows // PURGED, Pace(DEFAULT_BATCH_SIZE))
        # The last cycle is vacuumed at the pace of autovacuum.
        _maintain("autovacuum" if cycle == CYCLES - 1 else "VACUUM", phases, progress)
        left.add(f"cycle {cycle + 1}", *map(megabytes, sizes(TABLE).values()))
        with connection.cursor() as cursor:
            start = rows + cycle * rows // PURGED
            refill(cursor, TABLE, start, start + rows // PURGED, rows, progress)
    _maintain("REINDEX", phases, progress)
    left.add("after REINDEX", *map(megabytes, sizes(TABLE).values()))
    return left


def _purge(share: int, pace: Pace, last: datetime | None = None) -> int:
    deleted = 0
    for result in purge_batches(batch_size=min(pace.batch_size, share // pace.jobs), jobs=pace.jobs):
        deleted += result.deleted
        if deleted >= share:
            break
        time.sleep(pace.pause)
    return deleted


def nth_due(share: int) -> datetime:
    """When the last of the ``share`` records became due that have been due for longest.

    The database has marked the index entries of deleted records when it has passed over them once, as it has in a table
    that is vacuumed. Whoever purged next would do it otherwise.
    """
    with connection.cursor() as cursor:
        cursor.execute(NTH_DUE, [share - 1])
        ((found,),) = cursor.fetchall()
    return cast(datetime, found)


def delete(last: datetime) -> int:
    """Delete what was due then, by one statement."""
    with connection.cursor() as cursor:
        cursor.execute(DELETE, [last])
        return int(cursor.rowcount)


_MAINTENANCE = {
    "VACUUM": (f"VACUUM {TABLE}",),
    "autovacuum": ("SET vacuum_cost_delay = '2ms'", f"VACUUM {TABLE}", "RESET vacuum_cost_delay"),
    "REINDEX": (f"REINDEX TABLE CONCURRENTLY {TABLE}",),
}


def _maintain(name: str, phases: dict[str, Phase], progress: Callable[[str], None]) -> None:
    progress(f"purge: {name}")
    _checkpoint()
    with _measured(phases[name]), connection.cursor() as cursor:
        for statement in _MAINTENANCE[name]:
            cursor.execute(statement)


def _checkpoint() -> None:
    with connection.cursor() as cursor:
        cursor.execute("CHECKPOINT")


@contextmanager
def _measured(phase: Phase) -> Iterator[None]:
    before, cpu, start = written(), server_cpu() or 0, time.monotonic()
    yield
    phase.spans.append(Span(start, time.monotonic()))
    phase.cpu.append(((server_cpu() or 0) - cpu) / NANOSECONDS)
    phase.log.append(written().since(before).bytes)


def _speed(phases: dict[str, Phase], claimants: Claimants) -> Table:
    headings = ("rows a second", f"× {PLAIN}", "rows a CPU second", f"× {PLAIN}", "log, a row", *_CLAIMS)
    table = Table("Purge", ("", *headings))
    for name, phase in phases.items():
        if name in _MAINTENANCE:
            continue
        speed, cpu, log = ("–", "–"), ("–", "–"), "–"
        if phase.rows:
            speed = _compared(phase.rates, phases[PLAIN].rates)
            log = bytes_of(sum(phase.log) / sum(phase.rows))
            if "--jobs" not in name:  # jobs have sessions of their own
                cpu = _compared(phase.cpu_rates, phases[PLAIN].cpu_rates)
        table.add(name, *speed, *cpu, log, *_claims(phase, phases[IDLE], claimants))
    return table


def _compared(rates: list[float], base: list[float]) -> tuple[str, str]:
    return f"{statistics.median(rates):,.0f}", times(relative(rates, base))


def _maintenance(phases: dict[str, Phase], claimants: Claimants) -> Table:
    table = Table("Maintenance", ("", "seconds", "CPU", "log", *_CLAIMS))
    for name in _MAINTENANCE:
        phase = phases[name]
        seconds = statistics.median(span.end - span.start for span in phase.spans)
        log = megabytes(statistics.median(phase.log))
        cpu = f"{statistics.median(phase.cpu):.1f} s"
        table.add(name, f"{seconds:.1f} s", cpu, log, *_claims(phase, phases[IDLE], claimants))
    return table


_CLAIMS = ("claim, p50", "claim, p99", "× idle", "update, p99", "× idle", "operations")


def _claims(phase: Phase, idle: Phase, claimants: Claimants) -> tuple[str, ...]:
    timed, base = _timed(phase, claimants), _timed(idle, claimants)
    if not timed or not base:
        return ("–",) * len(_CLAIMS)
    claims, updates = [each.claim for each in timed], [each.complete for each in timed]
    idle_claim, idle_update = p99([each.claim for each in base]), p99([each.complete for each in base])
    return (
        milliseconds(statistics.median(claims)),
        milliseconds(p99(claims)),
        times(p99(claims) / idle_claim),
        milliseconds(p99(updates)),
        times(p99(updates) / idle_update),
        f"{len(timed):,}",
    )


def _timed(phase: Phase, claimants: Claimants) -> list[Timed]:
    return [each for span in phase.spans for each in claimants.between(*span)]


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]
