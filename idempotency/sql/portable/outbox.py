"""The outbox with Django's ORM."""

from __future__ import annotations

from datetime import timedelta

from django.db import IntegrityError, transaction
from django.db.models.functions import Now

from ...models import OutboxMessage
from ..store import Store


class Outbox(Store):
    def insert_message(self, message: OutboxMessage, delay: timedelta) -> bool:
        if delay:
            message.next_try_at = Now() + delay
        try:
            with transaction.atomic(using=self.using):  # a savepoint, so that an error leaves the transaction usable
                message.save(using=self.using, force_insert=True)
        except IntegrityError:
            return False
        if delay:
            message.refresh_from_db(using=self.using, fields=["next_try_at"])
        return True
