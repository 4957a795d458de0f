"""The definitions of the metrics: counters from the signals, and gauges from the statistics."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from django.apps import apps
from django.core.exceptions import SynchronousOnlyOperation
from django.db import DatabaseError, InterfaceError
from django.dispatch import Signal

from ... import signals
from ...lifecycle import Status
from ...operate.statistics import Stats, purge_overdue, stats
from ...store import records_database, statement_timeout
from ...store.statement_timeout import connection_as_found

if TYPE_CHECKING:
    from ...outbox.upkeep import Backlog

logger: Final = logging.getLogger("idempotency")

#: The counter of events, with the labels ``operation`` and ``event``.
EVENTS: Final = "idempotency_events"
EVENTS_DESCRIPTION: Final = "Events of records, by operation and event"


@dataclass(frozen=True)
class Count:
    """A counter without labels.

    :param name: the name without the suffix that Prometheus adds.
    :param signal: adds its ``count``, or else 1.
    """

    name: str
    description: str
    signal: Signal


COUNTS: Final = (
    Count("idempotency_unprotected_requests", "Requests without a key, which ran unprotected", signals.unprotected),
    Count("idempotency_purged_records", "Records deleted past their retention", signals.purged),
    Count("idempotency_relayed_messages", "Messages of the outbox confirmed by a broker", signals.relayed),
    Count("idempotency_dead_messages", "Messages of the outbox tried too often", signals.message_dead),
    Count("idempotency_dead_letters", "Messages dead-lettered or rejected by consumers", signals.dead_lettered),
)

#: The values of a gauge, by the values of its labels.
Values = dict[tuple[str, ...], float]


@dataclass(frozen=True)
class Gauge:
    """A number read from the tables, so it is the same in every process.

    :param labels: the names of the labels.
    """

    name: str
    description: str
    labels: tuple[str, ...]
    #: Called with the statistics and the backlog of the outbox, or None without an outbox.
    read: Callable[[Stats, Backlog | None], Values]


def _number(name: str, description: str, field: str) -> Gauge:
    """A gauge of one of the statistics, 0 if there is nothing to measure."""
    return Gauge(name, description, (), lambda read, _: {(): getattr(read, field).value or 0})


def _by_operation(name: str, description: str, field: str) -> Gauge:
    def read_counts(read: Stats, _: Backlog | None) -> Values:
        return {(operation,): count for operation, count in (getattr(read, field).by_operation or {}).items()}

    return Gauge(name, description, ("operation",), read_counts)


#: Read less often than the others. See ``operate.statistics.purge_overdue``.
PURGE_OVERDUE: Final = "idempotency_purge_overdue_seconds"
PURGE_PERIOD: Final = 600.0  # seconds


def _period() -> int:
    return int(time.monotonic() // PURGE_PERIOD)


@functools.lru_cache(maxsize=1)
def _purge_overdue(period: int) -> float:
    return purge_overdue()


#: Distinguishes an unreadable database from a healthy one.
AVAILABLE: Final = "idempotency_stats_available"

GAUGES: Final = (
    Gauge(AVAILABLE, "1 if the statistics could be read from the database, 0 if not", (), lambda *_: {(): 1}),
    Gauge(
        "idempotency_records",
        "Records by status. Counting stops at 10,000; larger numbers of completed ones are the database's estimate",
        ("status",),
        lambda read, _: {(str(status),): getattr(read, str(status)).value or 0 for status in Status},
    ),
    _by_operation("idempotency_parked_records", "Records whose outcome is unknown, by operation", "parked"),
    _by_operation("idempotency_abandoned_claims", "Claims whose lease is over, by operation", "abandoned"),
    _number("idempotency_overdue_seconds", "The time since the oldest lease of a record in progress ended", "overdue"),
    _number(
        "idempotency_oldest_in_progress_seconds",
        "The age of the oldest record in progress",
        "oldest_in_progress",
    ),
    _number(
        "idempotency_most_attempts",
        "The highest attempt number of the records in progress",
        "most_attempts",
    ),
    Gauge(
        PURGE_OVERDUE,
        "The time since the oldest record that a purge would delete became due, read every ten minutes",
        (),
        lambda *_: {(): _purge_overdue(_period())},
    ),
    Gauge(
        "idempotency_table_bytes",
        "The size of the table of records with its indexes, if the database reports it",
        (),
        lambda read, _: {} if read.table_bytes.value is None else {(): read.table_bytes.value},
    ),
    Gauge(
        "idempotency_outbox_messages",
        "Unsent messages of the outbox, by status. Counting stops at 10,000",
        ("status",),
        lambda _, waiting: {} if waiting is None else {("pending",): waiting.pending, ("dead",): waiting.dead},
    ),
    Gauge(
        "idempotency_outbox_oldest_due_seconds",
        "The time since the oldest due message of the outbox became due",
        (),
        lambda _, waiting: {} if waiting is None else {(): (waiting.oldest_due or timedelta()).total_seconds()},
    ),
)

#: Seconds per statement on PostgreSQL, because a scrape times out after ten. Without a limit, every scrape would block
#: a thread while a migration locks a table.
TIME_LIMIT: Final = 3.0


def read_gauges() -> dict[str, Values]:
    """Read all gauges: the table of records once, and the outbox once. Closes the connections that it opened.

    :returns: the values by the names of the gauges; only ``AVAILABLE`` if the database refuses or is too slow, so that
        the process's counters can still be exported.
    """
    try:
        with ExitStack() as stack:
            has_outbox = apps.is_installed("idempotency.outbox")
            outbox: Any = import_module("idempotency.outbox.upkeep") if has_outbox else None
            for using in sorted({records_database(), *([outbox.outbox_database()] if outbox else [])}):
                stack.enter_context(connection_as_found(using))
                stack.enter_context(statement_timeout.time_limit(using, TIME_LIMIT))
            read, waiting = stats(), outbox.backlog() if outbox else None
            return {gauge.name: gauge.read(read, waiting) for gauge in GAUGES}
    except (DatabaseError, InterfaceError, statement_timeout.OutOfTimeError):
        logger.warning("The statistics could not be read for the metrics", exc_info=True)
        return {AVAILABLE: {(): 0}}
    except SynchronousOnlyOperation:
        logger.error(
            "The metrics were collected in an event loop's thread, which can't read the database. Serve them with "
            "idempotency.contrib.prometheus.metrics or another synchronous view."
        )
        return {AVAILABLE: {(): 0}}


def connect_counters(count_event: Callable[[str, str], None], counted: Sequence[Callable[[int], None]]) -> None:
    """Connect the counters. Another call replaces them.

    :param count_event: called with the operation and the event, once per event.
    :param counted: a function for each of ``COUNTS``, called with the number to add.
    """
    signals.connect_events("prometheus", lambda operation, event, attempt: count_event(operation, event))
    for counter, add in zip(COUNTS, counted, strict=True):

        def receive(sender: Any, count: int = 1, add: Callable[[int], None] = add, **arguments: Any) -> None:
            add(count)

        counter.signal.disconnect(dispatch_uid=f"idempotency.prometheus.{counter.name}")
        counter.signal.connect(receive, weak=False, dispatch_uid=f"idempotency.prometheus.{counter.name}")
