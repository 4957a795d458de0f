"""The counters of this process, a collector that reads the gauges from the tables, and a view for a scrape of both."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from importlib import import_module
from typing import Any, Final

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured, SynchronousOnlyOperation
from django.db import DatabaseError, InterfaceError
from django.dispatch import Signal
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from prometheus_client import REGISTRY, CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from ... import signals
from ...lifecycle import Status
from ...operate.statistics import purge_overdue, stats
from ...store import records_database, statement_timeout
from ...store.statement_timeout import connection_as_found

logger: Final = logging.getLogger("idempotency")

#: The counter of events, with the labels ``operation`` and ``event``. Prometheus adds the suffix of counters.
EVENTS: Final = "idempotency_events"

#: The other counters, by name: the description, and the signal, which adds its ``count``, or else 1.
COUNTS: Final[Mapping[str, tuple[str, Signal]]] = {
    "idempotency_unprotected_requests": ("Requests without a key, which ran unprotected", signals.unprotected),
    "idempotency_purged_records": ("Records deleted past their retention", signals.purged),
    "idempotency_relayed_messages": ("Messages of the outbox confirmed by a broker", signals.relayed),
    "idempotency_dead_messages": ("Messages of the outbox tried too often", signals.message_dead),
    "idempotency_dead_letters": ("Messages dead-lettered or rejected by consumers", signals.dead_lettered),
}

#: Distinguishes an unreadable database from a healthy one.
AVAILABLE: Final = "idempotency_stats_available"

#: The gauges, by name: the description and the label. They are read from the tables, so they are the same in every
#: process.
GAUGES: Final[Mapping[str, tuple[str, str | None]]] = {
    AVAILABLE: ("1 if the statistics could be read from the database, 0 if not", None),
    "idempotency_records": (
        "Records by status. Counting stops at 10,000; larger numbers of completed ones are the database's estimate",
        "status",
    ),
    "idempotency_parked_records": ("Records whose outcome is unknown, by operation", "operation"),
    "idempotency_abandoned_claims": ("Claims whose lease is over, by operation", "operation"),
    "idempotency_overdue_seconds": ("The time since the oldest lease of a record in progress ended", None),
    "idempotency_oldest_in_progress_seconds": ("The age of the oldest record in progress", None),
    "idempotency_most_attempts": ("The highest attempt number of the records in progress", None),
    "idempotency_purge_overdue_seconds": (
        "The time since the oldest record that a purge would delete became due, read every ten minutes",
        None,
    ),
    "idempotency_table_bytes": ("The size of the table of records with its indexes, if the database reports it", None),
    "idempotency_outbox_messages": ("Unsent messages of the outbox, by status. Counting stops at 10,000", "status"),
    "idempotency_outbox_oldest_due_seconds": ("The time since the oldest due message of the outbox became due", None),
}

#: Seconds per statement on PostgreSQL, because a scrape times out after ten. Without a limit, every scrape would block
#: a thread while a migration locks a table.
TIME_LIMIT: Final = 3.0

#: Seconds. See ``operate.statistics.purge_overdue``.
PURGE_PERIOD: Final = 600.0

#: The registries passed to ``connect``, because a registry rejects a second metric of the same name.
_connected: list[CollectorRegistry] = []


def connect(registry: CollectorRegistry = REGISTRY) -> None:
    """Start counting, and make each scrape of ``registry`` read the gauges. Idempotent.

    :param registry: by default the global registry of ``prometheus_client``.
    """
    if registry in _connected:
        return
    events = Counter(EVENTS, "Events of records, by operation and event", ["operation", "event"], registry=registry)
    seen: set[str] = set()

    def count_event(operation: str, event: str, attempt: int) -> None:
        if operation not in seen:
            # Prometheus detects no increase in a series that begins with 1, so each series begins with 0.
            for name in signals.EVENTS:
                events.labels(operation, name)
            seen.add(operation)
        events.labels(operation, event).inc()

    signals.connect_events(f"prometheus.{len(_connected)}", count_event)
    for name, (description, signal) in COUNTS.items():
        _count(signal, Counter(name, description, registry=registry))
    registry.register(StatsCollector())
    _connected.append(registry)


def _count(signal: Signal, counter: Counter) -> None:
    def receive(sender: Any, count: int = 1, **arguments: Any) -> None:
        counter.inc(count)

    signal.connect(receive, weak=False)


class StatsCollector(Collector):
    """Reads the gauges in the process that is scraped."""

    def describe(self) -> Iterator[GaugeMetricFamily]:
        # Without this method, a registry would read the gauges to learn their names.
        for name, (description, _label) in GAUGES.items():
            yield GaugeMetricFamily(name, description)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, value in read_gauges().items():
            description, label = GAUGES[name]
            family = GaugeMetricFamily(name, description, labels=[label] if label else [])
            for of, number in value.items() if isinstance(value, Mapping) else [(None, value)]:
                family.add_metric([of] if of is not None else [], number)
            yield family


def read_gauges() -> dict[str, float | Mapping[str, float]]:
    """Read all gauges: the table of records once, and the outbox once. Closes the connections that it opened.

    :returns: for each gauge a number, or numbers by the values of its label; only ``AVAILABLE`` if the database refuses
        or is too slow, so that the process's counters can still be exported.
    """
    try:
        return {AVAILABLE: 1, **_read_gauges()}
    except (DatabaseError, InterfaceError, statement_timeout.OutOfTimeError):
        logger.warning("The statistics could not be read for the metrics", exc_info=True)
    except SynchronousOnlyOperation:
        logger.error(
            "The metrics were collected in an event loop's thread, which can't read the database. Serve them with "
            "idempotency.contrib.prometheus.metrics or another synchronous view."
        )
    return {AVAILABLE: 0}


def _read_gauges() -> dict[str, float | Mapping[str, float]]:
    has_outbox = apps.is_installed("idempotency.outbox")
    outbox: Any = import_module("idempotency.outbox.upkeep") if has_outbox else None
    with ExitStack() as stack:
        for using in sorted({records_database(), *([outbox.outbox_database()] if outbox else [])}):
            stack.enter_context(connection_as_found(using))
            stack.enter_context(statement_timeout.time_limit(using, TIME_LIMIT))
        read, waiting = stats(), outbox.backlog() if outbox else None
        late = _purge_overdue(int(time.monotonic() // PURGE_PERIOD))
    gauges: dict[str, float | Mapping[str, float]] = {
        "idempotency_records": {str(status): getattr(read, str(status)).value or 0 for status in Status},
        "idempotency_parked_records": read.parked.by_operation or {},
        "idempotency_abandoned_claims": read.abandoned.by_operation or {},
        "idempotency_overdue_seconds": read.overdue.value or 0,
        "idempotency_oldest_in_progress_seconds": read.oldest_in_progress.value or 0,
        "idempotency_most_attempts": read.most_attempts.value or 0,
        "idempotency_purge_overdue_seconds": late,
    }
    if read.table_bytes.value is not None:
        gauges["idempotency_table_bytes"] = read.table_bytes.value
    if waiting is not None:
        gauges["idempotency_outbox_messages"] = {"pending": waiting.pending, "dead": waiting.dead}
        gauges["idempotency_outbox_oldest_due_seconds"] = (waiting.oldest_due or timedelta()).total_seconds()
    return gauges


@functools.lru_cache(maxsize=1)
def _purge_overdue(period: int) -> float:
    return purge_overdue()


@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """Return all metrics of the project, including other packages' metrics.

    If ``PROMETHEUS_MULTIPROC_DIR`` is set, the counters of all processes are added up from their files. The registry
    for that has no collectors, so the collector of the gauges is added here.

    Access is not restricted. Ensure that only Prometheus can reach this view.

    :raises ImproperlyConfigured: the app is not installed.
    """
    if not apps.is_installed("idempotency.contrib.prometheus"):
        raise ImproperlyConfigured(
            "Add 'idempotency.contrib.prometheus' to INSTALLED_APPS, so that a scrape includes this package's metrics."
        )
    registry = REGISTRY
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        registry.register(StatsCollector())
    try:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    except (TypeError, ValueError):  # an invalid version number
        encode, content_type = choose_encoder("")
    return HttpResponse(encode(registry), content_type=content_type)
