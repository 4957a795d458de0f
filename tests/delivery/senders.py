"""Senders of the outbox besides the shipped one: one that publishes twice, and two that are broken."""

from __future__ import annotations

from uuid import uuid4

from idempotency.contrib import celery
from idempotency.outbox.models import OutboxMessage


def send_twice(message: OutboxMessage) -> None:
    celery.send(message)
    celery.send(message)


def send_without_identity(message: OutboxMessage) -> None:
    """What is to be one message for ever is a new one each time."""
    message.message_id = uuid4()
    message.idempotency_key = str(message.message_id)
    celery.send(message)


def send_most(message: OutboxMessage) -> None:
    """Says of every third message that it was sent, and sends it not."""
    if message.pk % 3:
        celery.send(message)
