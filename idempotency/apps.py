"""The app's wiring: what is switched on when Django has loaded the apps."""

from __future__ import annotations

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
        import_module("idempotency.http.checks")
        import_module("idempotency.upkeep.counters")  # counts from now on
        if find_spec("rest_framework") is not None:
            import_module("idempotency.contrib.rest_framework")  # registers its adapter; the core never imports it
        if find_spec("celery") is not None:
            # What is published inside a protected operation carries on its identity, and idempotent tasks are checked:
            # in every process, whether or not the project has imported Celery by now. That takes some 0.13 s. The tasks
            # come with it, because a commit asks for the relay by its name.
            import_module("idempotency.tasks")
        autodiscover_modules("operations")
