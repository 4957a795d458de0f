"""Metrics for OpenTelemetry's API: counters in every process, and gauges in the process that observes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from ... import __version__
from ..metrics import COUNTS, EVENTS, EVENTS_DESCRIPTION, GAUGES, Values, connect_counters, read_gauges

#: Seconds for which a reading is reused. An SDK observes the gauges one by one, and one reading serves all of them.
FRESH: Final = 5.0


def connect() -> None:
    """Start counting. The names are the Prometheus names with a dot instead of the first underscore."""
    meter = metrics.get_meter("idempotency", __version__)
    events = meter.create_counter(_dotted(EVENTS), "{event}", EVENTS_DESCRIPTION)
    counters = [meter.create_counter(_dotted(count.name), description=count.description) for count in COUNTS]
    connect_counters(
        "opentelemetry",
        lambda operation, event: events.add(1, {"operation": operation, "event": event}),
        [counter.add for counter in counters],
    )


def observe_stats() -> None:
    """Make this process report the gauges, which are read from the tables at each export.

    They are the same in every process. Call this in one process of the project, such as the sweep's.
    """
    meter, readings = metrics.get_meter("idempotency", __version__), Readings()
    for gauge in GAUGES:
        meter.create_observable_gauge(
            _dotted(gauge.name), [readings.of(gauge.name, gauge.labels)], gauge.unit, gauge.description
        )


class Readings:
    """Reads all gauges once per export."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = float("-inf")
        self._read: dict[str, Values] = {}

    def of(self, name: str, labels: tuple[str, ...]) -> Callable[[CallbackOptions], Iterator[Observation]]:
        """The callback of one gauge."""

        def observe(options: CallbackOptions) -> Iterator[Observation]:
            with self._lock:
                if time.monotonic() >= self._until:
                    self._read = read_gauges()
                    self._until = time.monotonic() + FRESH
                read = self._read
            for values, number in read.get(name, {}).items():
                yield Observation(number, dict(zip(labels, values, strict=True)))

        return observe


def _dotted(name: str) -> str:
    return name.replace("idempotency_", "idempotency.", 1)
