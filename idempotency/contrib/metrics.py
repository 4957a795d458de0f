"""What Prometheus and OpenTelemetry export alike: counters from the signals, and gauges from the statistics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from django.core.exceptions import SynchronousOnlyOperation
from django.db import DatabaseError, InterfaceError
from django.dispatch import Signal

from .. import signals
from ..lifecycle import Status
from ..models import MessageStatus
from ..operation import Operation
from ..outbox import alias as outbox_alias
from ..outbox.backlog import Backlog, backlog
from ..protocol.transactions import alias
from ..sql import bounded
from ..upkeep.counters import Counters, connection_as_found
from ..upkeep.stats import Number, Stats, stats

logger = logging.getLogger("idempotency")

#: The counter of events, which has the labels ``operation`` and ``event``.
EVENTS: Final = "idempotency_events"
EVENTS_DESCRIPTION: Final = "What has happened to records, by operation and event"


@dataclass(frozen=True)
class Count:
    """A counter without labels.

    :param name: its name, without the suffix that Prometheus adds.
    :param signal: each sending adds the signal's ``count``, or else 1.
    """

    name: str
    description: str
    signal: Signal


COUNTS: Final = (
    Count("idempotency_purged_records", "Records that were deleted past their retention", signals.purged),
    Count("idempotency_relayed_messages", "Messages of the outbox that a broker has confirmed", signals.relayed),
    Count("idempotency_dead_messages", "Messages of the outbox that were tried too often", signals.message_dead),
)

#: The values of a gauge, by its labels' values.
Values = dict[tuple[str, ...], float]


@dataclass(frozen=True)
class Gauge:
    """A number that is the same from every process, because it is read from the tables.

    :param unit: as OpenTelemetry writes it: ``s``, ``By``, or what is counted in braces.
    :param labels: the names of the labels.
    """

    name: str
    description: str
    unit: str
    labels: tuple[str, ...]
    read: Callable[[Stats, Backlog], Values]


def _of_operations(number: Number) -> Values:
    return {(operation,): count for operation, count in (number.by_operation or {}).items()}


def _single(value: float | None) -> Values:
    return {(): value or 0}


GAUGES: Final = (
    Gauge(
        "idempotency_records",
        "Records by status. Counting stops at 10,000; a larger number of completed ones is the database's estimate",
        "{record}",
        ("status",),
        lambda read, _: {(str(status),): getattr(read, str(status)).value or 0 for status in Status},
    ),
    Gauge(
        "idempotency_parked_records",
        "Records whose outcome nobody knows, by operation",
        "{record}",
        ("operation",),
        lambda read, _: _of_operations(read.parked),
    ),
    Gauge(
        "idempotency_abandoned_claims",
        "Claims whose lease is over, by operation",
        "{claim}",
        ("operation",),
        lambda read, _: _of_operations(read.abandoned),
    ),
    Gauge(
        "idempotency_overdue_seconds",
        "How long ago the oldest lease of a record in progress ended",
        "s",
        (),
        lambda read, _: _single(read.overdue.value),
    ),
    Gauge(
        "idempotency_oldest_in_progress_seconds",
        "How long ago the oldest record in progress was created",
        "s",
        (),
        lambda read, _: _single(read.oldest_in_progress.value),
    ),
    Gauge(
        "idempotency_most_attempts",
        "The highest attempt number of the records in progress",
        "{attempt}",
        (),
        lambda read, _: _single(read.most_attempts.value),
    ),
    Gauge(
        "idempotency_since_purge_seconds",
        "How long ago a purge last found nothing more to delete, to the hour; if none ever did, how long anything has "
        "been counted",
        "s",
        (),
        lambda read, _: _single(read.since_purge.value),
    ),
    Gauge(
        "idempotency_table_bytes",
        "The size of the table of records with its indexes, if the database can tell",
        "By",
        (),
        lambda read, _: {} if read.table_bytes.value is None else _single(read.table_bytes.value),
    ),
    Gauge(
        "idempotency_outbox_messages",
        "Messages of the outbox that are not sent, by status. Counting stops at 10,000",
        "{message}",
        ("status",),
        lambda _, waiting: {
            (MessageStatus.PENDING.value,): waiting.pending,
            (MessageStatus.DEAD.value,): waiting.dead,
        },
    ),
    Gauge(
        "idempotency_outbox_oldest_due_seconds",
        "How long the oldest due message of the outbox has been due",
        "s",
        (),
        lambda _, waiting: _single(None if waiting.oldest_due is None else waiting.oldest_due.total_seconds()),
    ),
)

#: Seconds for each statement, on PostgreSQL. Prometheus gives a scrape ten. If a migration has locked a table, every
#: scrape would keep a thread waiting.
PATIENCE: Final = 3.0

#: Tells a database that can't be read from one in which nothing is wrong.
AVAILABLE: Final = "idempotency_stats_available"
AVAILABLE_DESCRIPTION: Final = "1 if the statistics could be read from the database, 0 if not"


def read_gauges() -> dict[str, Values]:
    """Read all gauges: the table of records once, and the outbox once.

    Any thread may call this. It leaves no connection open that it has opened.

    :returns: the values by the names of the gauges, with ``AVAILABLE``; that one alone if the database refuses or is
        too slow, so that the process's own counters can be exported all the same.
    """
    try:
        with ExitStack() as stack:
            for using in sorted({alias(), outbox_alias()}):
                stack.enter_context(connection_as_found(using))
                stack.enter_context(bounded.time_limit(using, PATIENCE))
            read, waiting = stats(), backlog()
    except (DatabaseError, InterfaceError, bounded.OutOfTimeError):
        logger.warning("The statistics could not be read for the metrics", exc_info=True)
        return {AVAILABLE: {(): 0}}
    except SynchronousOnlyOperation:
        logger.error(
            "The metrics were collected in the thread of an event loop, where the database can't be read. Serve them "
            "by idempotency.contrib.prometheus.views.metrics or by another synchronous view."
        )
        return {AVAILABLE: {(): 0}}
    return {AVAILABLE: _single(1), **{gauge.name: gauge.read(read, waiting) for gauge in GAUGES}}


def connect_counters(
    exporter: str, count_event: Callable[[str, str], None], counted: Sequence[Callable[[int], None]]
) -> None:
    """Have an exporter count what happens in this process.

    :param exporter: its name. Another call for the same exporter replaces its functions.
    :param count_event: called with the operation and the event, once for each event. The operation is "" if somebody
        settled a record of an operation that this process doesn't know.
    :param counted: a function for each of ``COUNTS``, called with what to add.
    """
    for uid, signal, receive in _receivers(count_event, counted):
        signal.disconnect(dispatch_uid=f"idempotency.{exporter}.{uid}")
        signal.connect(receive, weak=False, dispatch_uid=f"idempotency.{exporter}.{uid}")


def _receivers(
    count_event: Callable[[str, str], None], counted: Sequence[Callable[[int], None]]
) -> Iterator[tuple[str, Signal, Callable[..., None]]]:
    for event, signal in Counters.WATCHED.items():

        def receive(sender: Operation | None, event: str = event, **arguments: Any) -> None:
            count_event("" if sender is None else sender.name, event)

        yield event, signal, receive
    for one, add in zip(COUNTS, counted, strict=True):

        def receive_count(sender: Any, count: int = 1, add: Callable[[int], None] = add, **arguments: Any) -> None:
            add(count)

        yield one.name, one.signal, receive_count
