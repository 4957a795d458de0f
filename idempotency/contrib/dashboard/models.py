"""The table of counts."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from ...conf import require_app
from ...models import BytewiseCharField

require_app("idempotency.contrib.dashboard")


class IdempotencyCounter(models.Model):
    """The number of times an event happened to an operation's records, in all processes."""

    id: models.BigAutoField[int, int] = models.BigAutoField(primary_key=True)
    #: In hours since 1970 in UTC. 0 is the sum of all hours.
    hour: models.IntegerField[int, int] = models.IntegerField(_("hour"), default=0)
    operation: BytewiseCharField = BytewiseCharField(_("operation"), max_length=255)
    #: The name of the signal that is counted.
    event: BytewiseCharField = BytewiseCharField(_("event"), max_length=32)
    total: models.BigIntegerField[int, int] = models.BigIntegerField(_("total"), default=0)

    objects: ClassVar[models.Manager[IdempotencyCounter]] = models.Manager()

    class Meta:
        db_table = "idempotency_dashboard_counter"
        verbose_name: ClassVar[Any] = _("counter")
        verbose_name_plural: ClassVar[Any] = _("dashboard")
        constraints: ClassVar[list[models.BaseConstraint]] = [
            # Begins with the hour, so that it serves the queries for the sums and the last hours.
            models.UniqueConstraint(fields=["hour", "operation", "event"], name="idempotency_dashboard_event"),
        ]

    def __str__(self) -> str:
        return f"{self.operation} {self.event}: {self.total}"
