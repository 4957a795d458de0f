"""The app, which switches on the metrics."""

from typing import Any

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class PrometheusConfig(AppConfig):
    name = "idempotency.contrib.prometheus"
    label = "idempotency_prometheus"
    verbose_name: Any = _("Idempotency: metrics for Prometheus")

    def ready(self) -> None:
        from .exporter import connect  # here, because it needs the models

        connect()
