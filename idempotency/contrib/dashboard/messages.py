"""The messages in the timeline of a record. Imported only if the outbox is installed.

Messages have no index by account or key, so they are looked for within a time limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db.models import Q, QuerySet
from django.utils.translation import gettext

from ...admin.display import AnyModelAdmin, url_of
from ...models import IdempotencyRecord
from ...outbox.models import MessageStatus, OutboxMessage, outbox_database
from ...store import statement_timeout
from .timeline import MAX_ROWS, Event, Timeline

#: A message is sent within milliseconds if a relay runs. Those of a whole day can't be searched.
NEAR = timedelta(minutes=1)


def add_messages(
    record: IdempotencyRecord, timeline: Timeline, records: AnyModelAdmin, messages: AnyModelAdmin
) -> None:
    """Add the message that led to this record, those of its chain that were published here, and what consumed them.

    :param records: the admin of records.
    :param messages: the admin of messages.
    """
    events = timeline.events
    arrived = _arrived(record)
    if arrived is not None:
        events += _of_message(arrived, messages)
    end = time.monotonic() + statement_timeout.LIMIT
    published: list[OutboxMessage] = []
    try:
        for query in (_unsent(record), _sent(record)):
            published += [message for message in _read_until(end, query) if arrived is None or message.pk != arrived.pk]
        events += _consumed(record, published, records, end)
    except statement_timeout.OutOfTimeError:
        timeline.notes.append(
            gettext("Not all of its messages were found in time: the outbox is large, or the database is busy.")
        )
    for message in published:
        events += _of_message(message, messages)
    timeline.notes.append(
        gettext(
            "Messages are listed if they wait, or were sent within a minute of the outcome. Those of the operations "
            "that this one led to belong to the same trace, and are listed, too."
        )
    )


def _read_until(end: float, query: QuerySet[Any]) -> list[Any]:
    """:raises OutOfTimeError: the query is not done at ``end``."""
    with statement_timeout.time_limit(query.db, end - time.monotonic()):
        return list(query)


def _outbox() -> QuerySet[OutboxMessage]:
    shown = ("message_id", "idempotency_key", "topic", "status", "created_at", "sent_at")
    return OutboxMessage.objects.using(outbox_database()).only(*shown)


def _arrived(record: IdempotencyRecord) -> OutboxMessage | None:
    """The message that this record's consumer claimed, if its key is that of a message."""
    try:
        message_id = UUID(record.idempotency_key.rpartition(".")[2])
    except ValueError:
        return None
    return _outbox().filter(message_id=message_id, idempotency_key=record.idempotency_key).first()


def _of_trace(record: IdempotencyRecord) -> QuerySet[OutboxMessage]:
    return _outbox().filter(account_id=record.account_id, idempotency_key__startswith=f"{record.scope.trace}.")


def _unsent(record: IdempotencyRecord) -> QuerySet[OutboxMessage]:
    # An OR of equalities, as in the condition of the index.
    return _of_trace(record).filter(Q(status=MessageStatus.PENDING) | Q(status=MessageStatus.DEAD))[:MAX_ROWS]


def _sent(record: IdempotencyRecord) -> QuerySet[OutboxMessage]:
    around = record.completed_at or record.created_at
    sent = _of_trace(record).filter(
        status=MessageStatus.SENT,
        sent_at__gte=max(record.created_at, around - NEAR),
        sent_at__lte=around + NEAR,
    )
    return sent.order_by("sent_at")[:MAX_ROWS]


def _of_message(message: OutboxMessage, messages: AnyModelAdmin) -> Iterator[Event]:
    values = {"topic": message.topic, "status": message.get_status_display()}
    url = url_of(messages, "change", message.pk)
    yield Event(message.created_at, gettext("Message to “%(topic)s” published; now %(status)s.") % values, url)
    if message.sent_at is not None:
        yield Event(message.sent_at, gettext("Message to “%(topic)s” confirmed by its broker.") % values, url)


def _consumed(
    record: IdempotencyRecord, published: list[OutboxMessage], records: AnyModelAdmin, end: float
) -> Iterator[Event]:
    """The records of consumers that claimed the messages under the producer's account, as they do by default."""
    if not published:
        return
    consumed = IdempotencyRecord.objects.using(record._state.db).filter(
        account_id=record.account_id, idempotency_key__in=[message.idempotency_key for message in published]
    )
    rows = consumed.order_by().values_list("pk", "operation", "status", "created_at")[:MAX_ROWS]
    for pk, operation, status, created_at in _read_until(end, rows):
        values = {"operation": operation, "status": status.replace("_", " ")}
        url = url_of(records, "change", pk)
        yield Event(created_at, gettext("A consumer, %(operation)s, claimed a message; now %(status)s.") % values, url)
