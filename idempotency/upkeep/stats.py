"""Statistics: what the table of records holds, and what has happened. Each number says how exact it is.

Nothing here reads a huge table. Records that are not completed have an index of their own and are counted up to a
bound. The number of the other records is the database's estimate. The events come from ``counters.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import datetime
from enum import Enum
from typing import Any

from django.db.models import Max, Min, QuerySet
from django.db.models.functions import Now

from .. import sql
from ..lifecycle import Status
from ..models import IdempotencyRecord, RecordQuerySet
from ..protocol.transactions import alias
from .counters import counters

#: Counting stops here. It takes milliseconds to count ten thousand index entries, and a higher count would not tell
#: the reader anything new.
MAX_COUNTED = 10_000

#: The name of each number here, and the event of ``counters.py`` that it counts.
EVENTS = {
    "claims": "claimed",
    "take_overs": "taken_over",
    "completions": "completed",
    "replays": "replayed",
    "conflicts": "conflicted",
    "reused_keys": "key_reused",
    "releases": "released",
    "lease_losses": "lease_lost",
    "recoveries": "recovered",
    "parkings": "parked",
}


class Precision(str, Enum):
    """How exact a number is."""

    EXACT = "exact"
    AT_LEAST = "at least"  # counting stopped at a bound
    ESTIMATE = "estimate"  # the database's estimate, from its last ANALYZE
    RECENT = "recent"  # each process reports up to ten seconds late, and a killed one does not report its last counts
    UNKNOWN = "unknown"  # the database can't tell

    __str__ = str.__str__


@dataclass(frozen=True)
class Number:
    """A value and how exact it is. The value is None when there is nothing to measure."""

    value: int | float | None
    kind: Precision


@dataclass(frozen=True)
class Stats:
    """The statistics. Ages are in seconds by the database's clock, sizes are in bytes, and all other fields are counts.

    The fields from ``claims`` on count events since the table of counters was created, so they only grow.
    """

    #: The size of the table with its indexes and its TOAST table, in bytes.
    table_bytes: Number
    records: Number
    in_progress: Number
    recoverable: Number
    completed: Number
    #: Records whose outcome nobody knows. They wait for somebody to find out.
    parked: Number
    #: Records in progress whose lease is over.
    abandoned: Number
    #: How long ago the oldest lease of a record in progress ended, in seconds; 0 if it still runs. If this is more than
    #: the interval between sweeps, no sweep is running, or the sweep doesn't know the operation.
    overdue: Number
    #: How long ago the oldest record in progress was created, in seconds.
    oldest_in_progress: Number
    #: The highest attempt number of the records in progress.
    most_attempts: Number
    claims: Number
    take_overs: Number
    completions: Number
    replays: Number
    #: The share of replays: replays / (replays + claims + take-overs). Refused requests don't count.
    replay_rate: Number
    conflicts: Number
    reused_keys: Number
    releases: Number
    lease_losses: Number
    #: Claims that a sweep, a reconciler or a person settled, whatever state they got.
    recoveries: Number
    parkings: Number

    def __iter__(self) -> Iterator[tuple[str, Number]]:
        return ((field.name, getattr(self, field.name)) for field in fields(self))

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """The statistics as plain data: ``{"parked": {"value": 3, "kind": "exact"}, ...}``."""
        return {name: {"value": number.value, "kind": str(number.kind)} for name, number in self}


def stats(using: str | None = None) -> Stats:
    """Read the statistics.

    :param using: a database alias; by default the one that records are written to.
    :returns: the numbers, each with its precision.
    :raises DatabaseError: the database refuses.
    """
    using = using or alias()
    records = RecordQuerySet(IdempotencyRecord, using=using)
    size = sql.store(using).measure()
    total = _count(records)
    unfinished = {status: _count(records.filter(status=status)) for status in Status if status != Status.COMPLETED}
    if total.kind is Precision.AT_LEAST and size.records is not None:
        total = Number(max(size.records, MAX_COUNTED), Precision.ESTIMATE)
    # completed = total - unfinished: exact if the total is exact, otherwise a lower bound.
    completed = Number(max(0, _whole(total) - sum(map(_whole, unfinished.values()))), total.kind)
    counted = _name_events(sum(counters.read(using).values(), Counter()))
    return Stats(
        table_bytes=Number(size.in_bytes, Precision.UNKNOWN if size.in_bytes is None else Precision.EXACT),
        records=total,
        in_progress=unfinished[Status.IN_PROGRESS],
        recoverable=unfinished[Status.RECOVERABLE],
        completed=completed,
        parked=unfinished[Status.PARKED],
        abandoned=_count(records.abandoned()),
        **_in_progress(records, unfinished[Status.IN_PROGRESS].kind),
        **{name: Number(count, Precision.RECENT) for name, count in counted.items()},
        replay_rate=Number(_replay_rate(counted), Precision.RECENT),
    )


def by_operation(using: str | None = None) -> dict[str, dict[str, int]]:
    """Read the counts of events for each operation.

    :param using: a database alias; by default the one that records are written to.
    :returns: ``{"charges.create": {"claims": 3, "replays": 1, ...}, ...}``. The names are those of ``Stats``, and every
        count is ``RECENT``. Operations without events are left out. The empty name stands for operations that were not
        declared in the process in which somebody resolved one of their records.
    :raises DatabaseError: the database refuses.
    """
    counted = counters.read(using or alias())
    return {operation: _name_events(events) for operation, events in sorted(counted.items())}


def _count(records: QuerySet[IdempotencyRecord]) -> Number:
    count = records.order_by()[:MAX_COUNTED].count()
    return Number(count, Precision.AT_LEAST if count == MAX_COUNTED else Precision.EXACT)


def _whole(number: Number) -> int:
    return int(number.value or 0)


def _in_progress(records: RecordQuerySet, kind: Precision) -> dict[str, Number]:
    # In the order of the index. If there are more claims than the bound, this reads those that were abandoned longest.
    listed = records.in_progress().order_by("lease_expires_at")
    first = listed.annotate(now=Now()).values_list("now", "lease_expires_at").first()
    now, lease = first or (None, None)
    seen = listed[:MAX_COUNTED].aggregate(created_at=Min("created_at"), attempt=Max("attempt"))
    return {
        "overdue": Number(_age(now, lease), Precision.EXACT),
        "oldest_in_progress": Number(_age(now, seen["created_at"]), kind),
        "most_attempts": Number(seen["attempt"], kind),
    }


def _age(now: datetime | None, since: datetime | None) -> float | None:
    """:returns: seconds, 0 if ``since`` lies ahead, or None if there is nothing to measure."""
    return None if now is None or since is None else max(0.0, round((now - since).total_seconds(), 3))


def _name_events(events: Counter[str]) -> dict[str, int]:
    return {name: events[event] for name, event in EVENTS.items()}


def _replay_rate(counted: dict[str, int]) -> float | None:
    settled = counted["replays"] + counted["claims"] + counted["take_overs"]
    return round(counted["replays"] / settled, 4) if settled else None
