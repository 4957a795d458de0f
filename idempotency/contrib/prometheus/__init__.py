"""Prometheus: counters from the signals, gauges from the statistics, a dashboard for Grafana, and rules for alerts.

An app: add ``"idempotency.contrib.prometheus"`` to ``INSTALLED_APPS``. Without it nothing is counted.
"""

from typing import TYPE_CHECKING

from .. import needing

with needing("prometheus"):
    import prometheus_client  # noqa: F401

from ...public import Getter, lazy

if TYPE_CHECKING:
    from .exporter import StatsCollector, connect
    from .views import metrics

__all__ = ["StatsCollector", "connect", "metrics"]

__getattr__: Getter = lazy(__name__, {"StatsCollector": "exporter", "connect": "exporter", "metrics": "views"})
