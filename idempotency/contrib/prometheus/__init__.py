"""Prometheus: counters from the signals, gauges from the statistics, a Grafana dashboard, and alerting rules.

An app: add ``"idempotency.contrib.prometheus"`` to ``INSTALLED_APPS``.
"""

from typing import TYPE_CHECKING

from .. import needing

with needing("prometheus"):
    import prometheus_client  # noqa: F401

from ...public import Getter, lazy

if TYPE_CHECKING:
    from .exporter import StatsCollector, connect, metrics

__all__ = ["StatsCollector", "connect", "metrics"]

__getattr__: Getter = lazy(__name__, dict.fromkeys(__all__, "exporter"))
