"""The counters of this process, a collector that reads the gauges from the tables, and a view for a scrape of both."""

from __future__ import annotations

import os
from collections.abc import Iterator

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from prometheus_client import REGISTRY, CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from ... import signals
from .definitions import COUNTS, EVENTS, EVENTS_DESCRIPTION, GAUGES, connect_counters, read_gauges

#: The registries passed to ``connect``, because a registry rejects a second metric of the same name.
_connected: list[CollectorRegistry] = []


def connect(registry: CollectorRegistry = REGISTRY) -> None:
    """Start counting, and make each scrape of ``registry`` read the gauges. Idempotent.

    :param registry: by default the global registry of ``prometheus_client``.
    """
    if registry in _connected:
        return
    events = Counter(EVENTS, EVENTS_DESCRIPTION, ["operation", "event"], registry=registry)
    counters = [Counter(count.name, count.description, registry=registry) for count in COUNTS]
    registry.register(StatsCollector())
    seen: set[str] = set()

    def count_event(operation: str, event: str) -> None:
        if operation not in seen:
            # Prometheus detects no increase in a series that begins with 1, so each series begins with 0.
            for name in signals.EVENTS:
                events.labels(operation, name)
            seen.add(operation)
        events.labels(operation, event).inc()

    connect_counters(count_event, [counter.inc for counter in counters])
    _connected.append(registry)


class StatsCollector(Collector):
    """Reads the gauges in the process that is scraped."""

    def describe(self) -> Iterator[GaugeMetricFamily]:
        # Without this method, a registry would read the gauges to learn their names.
        yield from _families().values()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families = _families()
        for name, values in read_gauges().items():
            for labels, value in values.items():
                families[name].add_metric(labels, value)
            yield families[name]


def _families() -> dict[str, GaugeMetricFamily]:
    return {gauge.name: GaugeMetricFamily(gauge.name, gauge.description, labels=gauge.labels) for gauge in GAUGES}


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
