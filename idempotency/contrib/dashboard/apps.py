"""The app that counts events and shows the counts in the admin."""

from typing import Any

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class DashboardConfig(AppConfig):
    name = "idempotency.contrib.dashboard"
    label = "idempotency_dashboard"
    verbose_name: Any = _("Idempotency: dashboard")
    default_auto_field: str = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from ... import extensions
        from .counting import counters  # here, because it needs the models

        counters.connect()
        extensions.register(self.name, extensions.Extension(event_counts=counters))
