"""The outbox on PostgreSQL: one statement publishes a message."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from ...models import OutboxMessage
from ..store import Store

# If the message exists already, that is no error, because an error would break the caller's transaction. After an
# attempt was cut off, the next one normally finds its messages.
_INSERT = """
INSERT INTO idempotency_outbox (message_id, account_id, idempotency_key, topic, sender, payload, headers, ordering_key,
    status, attempts, error, next_try_at)
VALUES (%s, %s, %s, %s, %s, %s::json, %s::jsonb, %s, 'pending', 0, '', statement_timestamp() + %s)
ON CONFLICT (message_id) DO NOTHING
RETURNING id, created_at, next_try_at
"""


class Outbox(Store):
    def insert_message(self, message: OutboxMessage, delay: timedelta) -> bool:
        parameters: tuple[Any, ...] = (
            message.message_id,
            message.account_id,
            message.idempotency_key,
            message.topic,
            message.sender,
            message.payload,
            json.dumps(message.headers),
            message.ordering_key,
            delay,
        )
        with self.connection.cursor() as cursor:
            cursor.execute(_INSERT, parameters)
            row = cursor.fetchone()
        if row is None:
            return False
        message.pk, message.created_at, message.next_try_at = row
        return True
