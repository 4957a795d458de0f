"""The app's wiring: what is switched on when Django has loaded the apps."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _


class IdempotencyConfig(AppConfig):
    name = "idempotency"
    verbose_name = _("Idempotency")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        import_module("idempotency.checks")
        import_module("idempotency.upkeep.counters")  # counts from now on
        if find_spec("rest_framework") is not None:
            import_module("idempotency.contrib.rest_framework")  # registers its adapter; the core never imports it
        if "celery" in sys.modules:  # a project with a Celery app: its tasks carry on the identity of their publisher
            import_module("idempotency.contrib.celery")
        autodiscover_modules("operations")
