"""The app, which switches on span events and links."""

from typing import Any

from django.apps import AppConfig, apps
from django.utils.translation import gettext_lazy as _


class OpenTelemetryConfig(AppConfig):
    name = "idempotency.contrib.opentelemetry"
    label = "idempotency_opentelemetry"
    verbose_name: Any = _("Idempotency: OpenTelemetry")

    def ready(self) -> None:
        # Imported here, because they need the models.
        from ... import extensions, signals
        from . import tracing

        signals.connect_events("opentelemetry.span", tracing.note_on_span)
        # The relay sends a message in its producer's context, so that an instrumented client continues the trace.
        additions = extensions.Extension(message_headers=tracing.current_context, sending_context=tracing.sending)
        extensions.register(self.name, additions)
        if apps.is_installed("idempotency.contrib.celery"):
            tracing.connect_celery()
