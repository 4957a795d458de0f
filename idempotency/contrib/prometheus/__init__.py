"""Prometheus: counters from the signals, gauges from the statistics, a dashboard for Grafana, and rules for alerts.

Add ``"idempotency.contrib.prometheus"`` to ``INSTALLED_APPS``. Without that nothing is counted.
"""

from .. import needing

with needing("prometheus"):
    import prometheus_client  # noqa: F401
