"""Prometheus: counters from the signals, gauges from the statistics, a dashboard for Grafana, and rules for alerts.

Add ``"idempotency.contrib.prometheus"`` to ``INSTALLED_APPS``. Without that nothing is counted.
"""

from __future__ import annotations

try:
    import prometheus_client  # noqa: F401
except ImportError as error:
    raise ImportError(
        "idempotency.contrib.prometheus needs prometheus-client. Install it with\n"
        "    python -m pip install 'django-idempotency[prometheus]'"
    ) from error
