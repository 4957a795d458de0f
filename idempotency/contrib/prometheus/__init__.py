"""Prometheus: counters from the signals, gauges from the statistics, a dashboard for Grafana, and rules for alerts.

An app: add ``"idempotency.contrib.prometheus"`` to ``INSTALLED_APPS``. Without it nothing is counted.
"""

from .. import needing

with needing("prometheus"):
    import prometheus_client  # noqa: F401
