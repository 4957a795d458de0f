"""The app's configuration: what is imported and connected when Django has loaded the apps."""

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
        import_module("idempotency.upkeep.counters")  # connects the counters to the signals
        import_module("idempotency.log").connect_if_named()
        if find_spec("rest_framework") is not None:
            import_module("idempotency.contrib.rest_framework")  # registers its adapter; the core never imports it
        if find_spec("ninja") is not None:
            import_module("idempotency.contrib.ninja")  # before the project declares its routes
        if find_spec("celery") is not None:
            # Every process needs this, whether or not the project has imported Celery already: it passes an operation's
            # identity on to the messages that it publishes, and it checks idempotent tasks. The import takes 0.13 s.
            # It includes the tasks, because a COMMIT calls the relay's task by its name.
            import_module("idempotency.tasks")
        autodiscover_modules("operations")
