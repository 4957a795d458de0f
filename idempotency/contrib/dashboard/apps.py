"""The app that counts events and shows the counts in the admin."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class DashboardConfig(AppConfig):
    name = "idempotency.contrib.dashboard"
    label = "idempotency_dashboard"
    verbose_name = _("Idempotency: dashboard")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from .counters import counters  # here, because it needs the models

        counters.connect()
