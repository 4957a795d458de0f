"""The app's wiring: what is switched on when Django has loaded the apps."""

from __future__ import annotations

from importlib import import_module

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules


class IdempotencyConfig(AppConfig):
    name = "idempotency"
    verbose_name = "Idempotency"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        import_module("idempotency.checks")
        import_module("idempotency.stats")  # counts from now on
        autodiscover_modules("operations")
