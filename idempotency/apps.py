"""The app's configuration: imports and connects what must be ready once Django has loaded the apps."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from django.apps import AppConfig, apps
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _


class IdempotencyConfig(AppConfig):
    name = "idempotency"
    verbose_name: Any = _("Idempotency")
    default_auto_field: str = "django.db.models.BigAutoField"

    def ready(self) -> None:
        import_module("idempotency.checks")
        import_module("idempotency.views.checks")
        import_module("idempotency.http.body_stream")
        import_module("idempotency.log").connect_if_named()
        # Each registers its adapter before the project declares its views and routes. The core never imports them.
        for framework in import_module("idempotency.http.adapter").FRAMEWORKS:
            if apps.is_installed(framework):
                import_module(f"idempotency.contrib.{framework}")
        autodiscover_modules("operations")
