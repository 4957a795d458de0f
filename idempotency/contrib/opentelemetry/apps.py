"""The app that switches spans' events, links and metrics on."""

from typing import Any

from django.apps import AppConfig, apps
from django.utils.translation import gettext_lazy as _


class OpenTelemetryConfig(AppConfig):
    name = "idempotency.contrib.opentelemetry"
    label = "idempotency_opentelemetry"
    verbose_name: Any = _("Idempotency: OpenTelemetry")

    def ready(self) -> None:
        # Imported here, because they need the models.
        from ... import signals
        from . import meters, tracing

        meters.connect()
        signals.connect_events("opentelemetry.span", tracing.note_on_span)
        if apps.is_installed("idempotency.outbox"):
            tracing.connect_outbox()
        if apps.is_installed("idempotency.contrib.celery"):
            tracing.connect_celery()
