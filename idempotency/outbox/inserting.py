"""Inserts a message in the caller's transaction: one statement on PostgreSQL, the ORM's on other databases."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Final

from django.db import IntegrityError, connections, transaction

from ..store import from_now, store_for
from .models import OutboxMessage

# If the message exists already, that is no error, because an error would break the caller's transaction. After an
# attempt was cut off, the next one normally finds its messages.
_INSERT = """
INSERT INTO idempotency_outbox_message (message_id, account_id, idempotency_key, topic, sender, payload, headers,
    status, attempts, error, next_try_at)
VALUES (%s, %s, %s, %s, %s, %s::json, %s::jsonb, 'pending', 0, '', statement_timestamp() + %s)
ON CONFLICT (message_id) DO NOTHING
RETURNING id, created_at, next_try_at
"""


def insert_message(using: str, message: OutboxMessage, delay: timedelta) -> bool:
    """Insert the message, and set the values that the database has made. The caller's transaction stays usable.

    :param delay: how long from now the message is kept back.
    :returns: False if there is a message with its id already.
    """
    return _INSERTS.get(connections[using].vendor, _insert)(using, message, delay)


def _insert_at_once(using: str, message: OutboxMessage, delay: timedelta) -> bool:
    scope = (message.message_id, message.account_id, message.idempotency_key)
    content = (message.topic, message.sender, message.payload, json.dumps(message.headers))
    row = store_for(using).row_of(_INSERT, (*scope, *content, delay))
    if row is None:
        return False
    message.pk, message.created_at, message.next_try_at = row
    return True


def _insert(using: str, message: OutboxMessage, delay: timedelta) -> bool:
    if delay:
        message.next_try_at = from_now(delay)
    try:
        with transaction.atomic(using=using):  # a savepoint, so that an error leaves the transaction usable
            message.save(using=using)
    except IntegrityError as error:
        if not store_for(using).is_duplicate(error):
            raise
        return False
    if delay:
        message.refresh_from_db(using=using)
    return True


_INSERTS: Final[Mapping[str, Callable[[str, OutboxMessage, timedelta], bool]]] = {"postgresql": _insert_at_once}
