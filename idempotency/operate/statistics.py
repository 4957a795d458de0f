"""Statistics: the contents of the table of records, and counts of events, each with its precision.

Nothing here reads a whole table. Unfinished records have an index and are counted up to a bound. The number of other
records is the database's estimate. The app ``idempotency.contrib.dashboard`` counts events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from django.db.models import BooleanField, ExpressionWrapper, Q, QuerySet

from ..extensions import EventCounts, extensions
from ..lifecycle import Status
from ..models import IdempotencyRecord, Now, RecordQuerySet
from ..operation import registry
from ..store import records_database, upkeep_for

#: Counting stops here. Ten thousand index entries take milliseconds.
MAX_COUNTED = 10_000

#: The names of counts, with the events of ``signals.EVENTS`` that they count.
EVENTS = {
    "claims": "claimed",
    "take_overs": "taken_over",
    "completions": "completed",
    "replays": "replayed",
    "conflicts": "conflicted",
    "reused_keys": "key_reused",
    "releases": "released",
    "unrecorded": "unrecorded",
    "lease_losses": "lease_lost",
    "recoveries": "recovered",
    "parkings": "parked",
}


def event_counts() -> EventCounts | None:
    """The ``Counters`` of ``contrib.dashboard``, or None if that app is not installed."""
    return next((each.event_counts for each in extensions() if each.event_counts), None)


def write_counts(*, if_due: bool = False) -> None:
    """Write the counts of this process, if an app counts events. With ``if_due``, only if a flush is due."""
    counts = event_counts()
    if counts is not None:
        (counts.flush_if_due if if_due else counts.flush)()


class Precision(StrEnum):
    """How exact a number is."""

    EXACT = "exact"
    AT_LEAST = "at least"  # counting stopped at a bound
    ESTIMATE = "estimate"  # the database's, from its last ANALYZE
    RECENT = "recent"  # processes report up to ten seconds late, and a killed process loses its last counts
    UNKNOWN = "unknown"  # the database does not provide it, or no app counts events


@dataclass(frozen=True)
class Number:
    """A value and its precision. The value is None if there is nothing to measure."""

    value: int | float | None
    kind: Precision
    #: The number of records by operation, for ``parked`` and ``abandoned``.
    by_operation: Mapping[str, int] | None = field(default=None, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain data: ``{"value": 3, "kind": "exact"}``, and ``"by_operation"`` if known."""
        plain: dict[str, Any] = {"value": self.value, "kind": str(self.kind)}
        return plain if self.by_operation is None else {**plain, "by_operation": dict(self.by_operation)}


@dataclass(frozen=True)
class Stats:
    """The statistics. Ages are in seconds by the database's clock, sizes in bytes; all other fields are counts.

    The fields from ``claims`` on count events since the table of counters was created.
    """

    #: With indexes and TOAST table.
    table_bytes: Number
    records: Number
    in_progress: Number
    recoverable: Number
    completed: Number
    #: Records whose outcome is unknown, which wait for a decision.
    parked: Number
    #: Records in progress whose lease is over.
    abandoned: Number
    #: The time since the oldest lease of a record in progress ended; 0 if none ended. If this exceeds the interval
    #: between sweeps, no sweep is running, or the operation is not declared in the sweep's process.
    overdue: Number
    #: The age of the oldest record in progress.
    oldest_in_progress: Number
    #: The highest attempt number of the records in progress.
    most_attempts: Number
    claims: Number
    take_overs: Number
    completions: Number
    replays: Number
    #: replays / (replays + claims + take-overs).
    replay_rate: Number
    conflicts: Number
    reused_keys: Number
    #: Attempts that failed without an effect.
    releases: Number
    #: Attempts with a response below 500 that their operation does not record. Not failures.
    unrecorded: Number
    lease_losses: Number
    #: Claims settled by a sweep, a reconciler or an operator.
    recoveries: Number
    parkings: Number

    def __iter__(self) -> Iterator[tuple[str, Number]]:
        return ((field.name, getattr(self, field.name)) for field in fields(self))

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain data: ``{"parked": {"value": 3, "kind": "exact"}, ...}``."""
        return {name: number.as_dict() for name, number in self}


def stats(using: str | None = None) -> Stats:
    """Read the statistics: numbers, each with its precision."""
    using = using or records_database()
    records = RecordQuerySet(IdempotencyRecord, using=using)
    size = upkeep_for(using).measure()
    # From the newest id. A purge empties the other end, whose dead rows remain until a vacuum.
    total = _count(records.order_by("-pk"))
    claims = _claims_in_progress(records)
    recoverable = _count(records.recoverable())
    # Grouped here, because the ORM can't group the rows of a bounded query.
    parked = _tally(records.parked().order_by().values_list("operation", flat=True)[:MAX_COUNTED])
    if total.kind is Precision.AT_LEAST and size.records is not None:
        total = Number(max(size.records, MAX_COUNTED), Precision.ESTIMATE)
    # Exact if the total is exact, otherwise a lower bound.
    unfinished = sum(int(number.value or 0) for number in (claims["in_progress"], recoverable, parked))
    completed = Number(max(0, int(total.value or 0) - unfinished), total.kind)
    return Stats(
        table_bytes=Number(size.in_bytes, Precision.UNKNOWN if size.in_bytes is None else Precision.EXACT),
        records=total,
        recoverable=recoverable,
        completed=completed,
        parked=parked,
        **claims,
        **_events(using),
    )


def _events(using: str) -> dict[str, Number]:
    counts = event_counts()
    if counts is None:
        return dict.fromkeys([*EVENTS, "replay_rate"], Number(None, Precision.UNKNOWN))
    events: Counter[str] = sum(counts.read(using).values(), Counter())
    counted = {name: events[event] for name, event in EVENTS.items()}
    settled = counted["replays"] + counted["claims"] + counted["take_overs"]
    return {
        **{name: Number(count, Precision.RECENT) for name, count in counted.items()},
        "replay_rate": Number(round(counted["replays"] / settled, 4) if settled else None, Precision.RECENT),
    }


def _count(records: QuerySet[IdempotencyRecord]) -> Number:
    return _bounded(records[:MAX_COUNTED].count())


def _tally(operations: Iterable[str]) -> Number:
    tally = Counter(operations)
    return replace(_bounded(tally.total()), by_operation=dict(tally))


def _bounded(count: int) -> Number:
    return Number(count, Precision.AT_LEAST if count == MAX_COUNTED else Precision.EXACT)


def _claims_in_progress(records: RecordQuerySet) -> dict[str, Number]:
    """All numbers about claims in progress, from one statement, which reads the claims abandoned longest first."""
    is_over = ExpressionWrapper(Q(lease_expires_at__lte=Now()), output_field=BooleanField())
    listed = records.in_progress().order_by("lease_expires_at").annotate(is_over=is_over, now=Now())
    claims = list(
        listed.values_list("operation", "is_over", "now", "lease_expires_at", "created_at", "attempt")[:MAX_COUNTED]
    )
    number = _bounded(len(claims))
    # Abandoned claims come first in the index, so this count is exact unless all claims read are abandoned.
    abandoned = _tally(operation for operation, is_over, *_ in claims if is_over)
    now, lease = claims[0][2:4] if claims else (None, None)
    return {
        "in_progress": number,
        "abandoned": abandoned,
        "overdue": Number(_age(now, lease), Precision.EXACT),
        "oldest_in_progress": Number(_age(now, min((claim[4] for claim in claims), default=None)), number.kind),
        "most_attempts": Number(max((claim[5] for claim in claims), default=None), number.kind),
    }


def purge_overdue(using: str | None = None) -> float:
    """The time in seconds since the oldest record that a purge would delete became due; 0 if none is due.

    If it exceeds the interval between purges, no purge is running, or it stops early. Until a vacuum removes them, this
    passes the index entries of purged records, so read it every few minutes, not with each scrape.
    """
    records = RecordQuerySet(IdempotencyRecord, using=using or records_database())
    purged = records.exclude(status=Status.IN_PROGRESS).exclude(status=Status.PARKED).order_by("expires_at")
    oldest = purged.annotate(now=Now()).values_list("now", "expires_at").first()
    return 0.0 if oldest is None else _age(*oldest) or 0.0


def undeclared(using: str | None = None) -> Number:
    """Count the newest records within retention whose operation this process does not declare, by operation.

    After an operation is renamed, or its declaration moved to another module of a router, each earlier key is new: a
    retry runs again. This finds the records of the earlier name. Call it in a process that has imported every
    declaration. It reads the newest 10,000 records.
    """
    records = RecordQuerySet(IdempotencyRecord, using=using or records_database())
    # An expression, because a condition could make the database search the whole table for records that meet it.
    is_kept = ExpressionWrapper(Q(expires_at__gt=Now()), output_field=BooleanField())
    newest = list(records.order_by("-pk").annotate(is_kept=is_kept).values_list("operation", "is_kept")[:MAX_COUNTED])
    tally = Counter(operation for operation, kept in newest if kept and registry.get(operation) is None)
    return Number(tally.total(), _bounded(len(newest)).kind, dict(tally))


def _age(now: datetime | None, since: datetime | None) -> float | None:
    """:returns: seconds; 0 if ``since`` is in the future; None if a time is missing."""
    return None if now is None or since is None else max(0.0, round((now - since).total_seconds(), 3))
