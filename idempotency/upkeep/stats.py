"""Numbers to watch: what the table holds, and what has happened. Each says how far it can be trusted.

Nothing here reads a huge table: what is not completed is found through its own index and counted up to a bound, and the
size of the rest is the database's estimate. What has happened is counted by ``counters.py``.
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

#: Counting stops here. Ten thousand index entries take milliseconds, and more parked records say nothing more.
MAX_COUNTED = 10_000

#: What has happened, by its name here, and the event that is counted for it.
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
    """How far a number can be trusted."""

    EXACT = "exact"
    AT_LEAST = "at least"  # counting stopped at a bound
    ESTIMATE = "estimate"  # the database's own, from its last analysis
    RECENT = "recent"  # of all processes, each up to ten seconds late; what a killed one had not written is missing
    UNKNOWN = "unknown"  # the database can't say

    __str__ = str.__str__


@dataclass(frozen=True)
class Number:
    """A value and how far it can be trusted. The value is None when there is nothing to measure."""

    value: int | float | None
    kind: Precision


@dataclass(frozen=True)
class Stats:
    """See each field. Ages are seconds by the database's clock, sizes are bytes, everything else counts.

    From ``claims`` on the counts are of what has happened since the table of counters was made, and only grow.
    """

    #: The table with its indexes and its over-long values, in bytes.
    table_bytes: Number
    records: Number
    in_progress: Number
    recoverable: Number
    completed: Number
    #: Nobody knows how they ended, and they wait for somebody to find out.
    parked: Number
    #: In progress with their lease over.
    abandoned: Number
    #: How long ago the first of the leases in progress ended, in seconds; 0 if it runs. When it exceeds the interval of
    #: the sweeps, recovery isn't running or doesn't know the operation.
    overdue: Number
    #: How long ago the oldest record that is in progress was created, in seconds.
    oldest_in_progress: Number
    #: The most attempts that a record which is in progress has had.
    most_attempts: Number
    claims: Number
    take_overs: Number
    completions: Number
    replays: Number
    #: Replays among all requests that named a key and met no trouble: replays / (replays + claims + take-overs).
    replay_rate: Number
    conflicts: Number
    reused_keys: Number
    releases: Number
    lease_losses: Number
    #: Abandoned claims settled by a sweep, a reconciler or an operator, to whatever end.
    recoveries: Number
    parkings: Number

    def __iter__(self) -> Iterator[tuple[str, Number]]:
        return ((field.name, getattr(self, field.name)) for field in fields(self))

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain data: ``{"parked": {"value": 3, "kind": "exact"}, ...}``."""
        return {name: {"value": number.value, "kind": str(number.kind)} for name, number in self}


def stats(using: str | None = None) -> Stats:
    """Look at the table of records, and at what all processes have counted.

    :param using: a database alias, by default the one that records are written to.
    :raises DatabaseError: as the database does.
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
    """What has happened to each operation's records: ``{"charges.create": {"claims": 3, "replays": 1, ...}, ...}``.

    Counts as in ``Stats``, all ``RECENT``. Operations to which nothing has happened are not there. Under the
    empty name is what operators settled of operations that their process didn't know.

    :param using: a database alias, by default the one that records are written to.
    :raises DatabaseError: as the database does.
    """
    counted = counters.read(using or alias())
    return {operation: _name_events(events) for operation, events in sorted(counted.items())}


def _count(records: QuerySet[IdempotencyRecord]) -> Number:
    count = records.order_by()[:MAX_COUNTED].count()
    return Number(count, Precision.AT_LEAST if count == MAX_COUNTED else Precision.EXACT)


def _whole(number: Number) -> int:
    return int(number.value or 0)


def _in_progress(records: RecordQuerySet, kind: Precision) -> dict[str, Number]:
    # In the index's order, so of more claims than are looked at these are the ones that have been abandoned longest.
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
    """Seconds; None where there is nothing, 0 for what lies ahead."""
    return None if now is None or since is None else max(0.0, round((now - since).total_seconds(), 3))


def _name_events(events: Counter[str]) -> dict[str, int]:
    return {name: events[event] for name, event in EVENTS.items()}


def _replay_rate(counted: dict[str, int]) -> float | None:
    settled = counted["replays"] + counted["claims"] + counted["take_overs"]
    return round(counted["replays"] / settled, 4) if settled else None
