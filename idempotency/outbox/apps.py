"""The app of the outbox."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class OutboxConfig(AppConfig):
    name = "idempotency.outbox"
    label = "idempotency_outbox"
    verbose_name: Any = _("Idempotency: outbox")
    default_auto_field: str = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from .. import extensions
        from .upkeep import PURGE_OF_SENT, find_messages  # here, because they need the models

        additions = extensions.Extension(
            purges=(PURGE_OF_SENT,), find_messages=find_messages, record_events=_record_events
        )
        extensions.register(self.name, additions)


def _record_events(*page: Any) -> Iterator[Any]:
    from .timeline import events_of  # here, because a project need not install the admin

    return events_of(*page)
