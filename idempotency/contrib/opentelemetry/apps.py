"""The app that switches spans' events, links and metrics on."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class OpenTelemetryConfig(AppConfig):
    name = "idempotency.contrib.opentelemetry"
    label = "idempotency_opentelemetry"
    verbose_name = _("Idempotency: OpenTelemetry")

    def ready(self) -> None:
        modules = ["spans", "messages", "meters", *(["celery"] if find_spec("celery") is not None else [])]
        for module in modules:
            import_module(f"idempotency.contrib.opentelemetry.{module}").connect()
