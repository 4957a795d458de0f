"""The messages in the timeline of a record.

Messages have no index by account or key, so the search has a time limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.contrib.admin import AdminSite
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext

from ..admin.decisions import DecisionAdmin, admin_of
from ..admin.display import url_of
from ..admin.timeline import MAX_ROWS
from ..extensions import Event
from ..models import IdempotencyRecord
from ..store import statement_timeout
from .models import MessageStatus, OutboxMessage, outbox_database

#: A running relay sends a message within milliseconds, and a whole day's messages are too many to search.
NEAR = timedelta(minutes=1)


def admin_of_messages(site: AdminSite, request: HttpRequest) -> DecisionAdmin | None:
    """The admin of messages, if the user may view it."""
    messages = admin_of(site, OutboxMessage)
    return messages if messages is not None and messages.has_view_permission(request) else None


def events_of(
    record: IdempotencyRecord, request: HttpRequest, records: DecisionAdmin, notes: list[str]
) -> Iterator[Event]:
    """The message that led to this record, the messages of its trace, and the records of their consumers.

    Adds a note if some may be missing.
    """
    messages = admin_of_messages(records.admin_site, request)
    if messages is None:
        return
    arrived = _arrived(record)
    found = {} if arrived is None else {arrived.pk: arrived}
    try:
        for query in _of_trace(record):
            found |= {message.pk: message for message in _read(query)}
        keys = [message.idempotency_key for message in found.values() if message != arrived]
        yield from _consumed(record, keys, records)
    except statement_timeout.OutOfTimeError:
        notes.append(gettext("Some messages or consumers may be missing: reading them took too long."))
    for message in found.values():
        yield from _of_message(message, messages)
    notes.append(
        gettext(
            "Messages of the same trace are listed if they wait, or were sent within a minute of the outcome. This "
            "includes messages of later operations."
        )
    )


def _read(query: QuerySet[Any]) -> list[Any]:
    """:raises OutOfTimeError: the query takes too long. Time that passes between queries says nothing about them."""
    with statement_timeout.time_limit(query.db):
        return list(query)


def _outbox() -> QuerySet[OutboxMessage]:
    shown = ("message_id", "idempotency_key", "topic", "status", "created_at", "sent_at")
    return OutboxMessage.objects.using(outbox_database()).only(*shown)


def _arrived(record: IdempotencyRecord) -> OutboxMessage | None:
    """The message that this record claims, if its key is the key of a message."""
    try:
        message_id = UUID(record.idempotency_key.rpartition(".")[2])
    except ValueError:
        return None
    return _outbox().filter(message_id=message_id, idempotency_key=record.idempotency_key).first()


def _of_trace(record: IdempotencyRecord) -> tuple[QuerySet[OutboxMessage], QuerySet[OutboxMessage]]:
    """:returns: the unsent messages of the record's trace, and the messages that were sent near its outcome."""
    messages = _outbox().filter(account_id=record.account_id, idempotency_key__startswith=f"{record.scope.trace}.")
    # An OR of equalities, as in the condition of the index.
    unsent = messages.filter(Q(status=MessageStatus.PENDING) | Q(status=MessageStatus.DEAD))
    around = record.completed_at or record.created_at
    since = max(record.created_at, around - NEAR)
    sent = messages.filter(status=MessageStatus.SENT, sent_at__gte=since, sent_at__lte=around + NEAR)
    return unsent[:MAX_ROWS], sent.order_by("sent_at")[:MAX_ROWS]


def _of_message(message: OutboxMessage, messages: DecisionAdmin) -> Iterator[Event]:
    values = {"topic": message.topic, "status": message.get_status_display()}
    url = url_of(messages, "change", message.pk)
    yield Event(message.created_at, gettext("Message to “%(topic)s” published; now %(status)s.") % values, url)
    if message.sent_at is not None:
        yield Event(message.sent_at, gettext("Message to “%(topic)s” confirmed by its broker.") % values, url)


def _consumed(record: IdempotencyRecord, keys: list[str], records: DecisionAdmin) -> Iterator[Event]:
    """The records of consumers under the producer's account, which is the default."""
    consumed = IdempotencyRecord.objects.using(record._state.db).filter(
        account_id=record.account_id, idempotency_key__in=keys
    )
    rows = consumed.order_by().values_list("pk", "operation", "status", "created_at")[:MAX_ROWS]
    for pk, operation, status, created_at in _read(rows):
        values = {"operation": operation, "status": status.replace("_", " ")}
        url = url_of(records, "change", pk)
        yield Event(created_at, gettext("A consumer, %(operation)s, claimed a message; now %(status)s.") % values, url)
