"""The timeline on the page of a record, in the order of time.

No request writes anything for it. So it is made of the record's own times, its steps, the decisions in the admin's log
and the messages of the outbox. An event without a recorded time stands where it belongs, and the page says so.

Every query reads a bounded number of rows through an index. Messages have no index by account or key, so they are
looked for within a time limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.apps import apps
from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.text import Truncator
from django.utils.translation import gettext, ngettext

from ...admin.decisions import DecisionAdmin
from ...admin.display import format_duration, time_left, url_of
from ...lifecycle import Status
from ...models import IdempotencyRecord, IdempotencyStep
from ...store import statement_timeout

if apps.is_installed("idempotency.outbox"):
    from ...outbox.models import MessageStatus, OutboxMessage, outbox_database

#: The page lists this many steps, decisions and messages of each kind.
MAX_ROWS = 50

#: An error is shown up to this length. The whole is on the same page.
MAX_ERROR = 200  # characters

#: A message is sent within milliseconds if a relay runs. The messages of a whole day can't be searched.
NEAR = timedelta(minutes=1)


@dataclass(frozen=True)
class Event:
    """One line of the timeline."""

    #: The time by which it is sorted.
    place: datetime
    what: str
    url: str = ""
    #: Whether ``place`` is when it happened. Otherwise that is not recorded.
    is_dated: bool = True


def timeline_of(
    record: IdempotencyRecord, request: HttpRequest, records: DecisionAdmin, messages: DecisionAdmin | None
) -> dict[str, Any]:
    """Read the timeline of a record, as far as the person may see it.

    :param record: annotated with ``database_time``.
    :param records: the admin of records.
    :param messages: the admin of messages, or None if the person may not see messages.
    :returns: ``events``, each with its time since the record's creation, and ``notes`` about those that are missing.
    """
    notes: list[str] = []
    events = [*_of_record(record, request), *_steps(record, notes), *_decisions(record)]
    if messages is not None:
        events += _of_messages(record, notes, records, messages)
    events.sort(key=lambda event: event.place)
    return {"events": [(event, _offset(event.place - record.created_at)) for event in events], "notes": notes}


def _offset(duration: timedelta) -> str:
    sign, length = ("-", -duration) if duration < timedelta(0) else ("+", duration)
    seconds = length.total_seconds()
    return f"{sign}{seconds:.3f} s" if seconds < 60 else f"{sign}{format_duration(length)}"


# The record, its steps and its decisions


def _of_record(record: IdempotencyRecord, request: HttpRequest) -> Iterator[Event]:
    values = {"attempt": record.attempt, "status": record.response_status}
    yield Event(record.created_at, gettext("The request was claimed for the first time."))
    if record.attempt > 1:
        earlier = ngettext(
            "%(count)d earlier attempt. Attempts are counted and not recorded one by one. If the key was used again "
            "after its retention, those of the request before are counted, too.",
            "%(count)d earlier attempts. Attempts are counted and not recorded one by one. If the key was used again "
            "after its retention, those of the request before are counted, too.",
            record.attempt - 1,
        )
        yield Event(record.created_at, earlier % {"count": record.attempt - 1}, is_dated=False)
    now = record.completed_at or record.database_time  # type: ignore[attr-defined]
    if request.user.has_perm("idempotency.view_response_body") and record.error:
        failure = gettext("The latest attempt that failed: %(error)s")
        yield Event(now, failure % {"error": Truncator(record.error).chars(MAX_ERROR)}, is_dated=False)
    if record.completed_at is not None:
        yield Event(record.completed_at, gettext("Attempt %(attempt)d was completed with status %(status)s.") % values)
    elif record.status == Status.IN_PROGRESS and record.lease_expires_at is not None:
        if time_left(record, record.lease_expires_at) > timedelta(0):
            lease = gettext("The lease of attempt %(attempt)d ends, unless it is renewed.")
        else:
            lease = gettext("The lease of attempt %(attempt)d ended without an outcome.")
        yield Event(record.lease_expires_at, lease % values)
    elif record.status == Status.PARKED:
        yield Event(now, gettext("Parked: it is unknown how attempt %(attempt)d ended.") % values, is_dated=False)
    elif record.status == Status.RECOVERABLE:
        yield Event(now, gettext("Released or recovered: the next retry runs the operation."), is_dated=False)
    is_over = time_left(record, record.expires_at) <= timedelta(0)
    yield Event(record.expires_at, gettext("The retention ended.") if is_over else gettext("The retention ends."))


def _steps(record: IdempotencyRecord, notes: list[str]) -> Iterator[Event]:
    rows = IdempotencyStep.objects.using(record._state.db).filter(account_id=record.account_id, record_id=record.pk)
    # By name, because that is the order of the index. Only the rows that are shown are then read.
    steps = list(rows.order_by("name").values_list("name", "created_at")[: MAX_ROWS + 1])
    if len(steps) > MAX_ROWS:
        notes.append(gettext("Only %(count)d of its steps are listed.") % {"count": MAX_ROWS})
    for name, created_at in steps[:MAX_ROWS]:
        yield Event(created_at, gettext("The result of step “%(name)s” was stored.") % {"name": name})


def _decisions(record: IdempotencyRecord) -> Iterator[Event]:
    entries = LogEntry.objects.filter(
        content_type=ContentType.objects.get_for_model(record), object_id=str(record.pk)
    ).select_related("user")
    for entry in entries.order_by("-action_time")[:MAX_ROWS]:
        yield Event(entry.action_time, f"{entry.user}: {entry.get_change_message()}")


# Its messages


def _of_messages(
    record: IdempotencyRecord, notes: list[str], records: DecisionAdmin, messages: DecisionAdmin
) -> Iterator[Event]:
    """The message that led to this record, the published ones of its chain, and the records of their consumers."""
    arrived = _arrived(record)
    found = {} if arrived is None else {arrived.pk: arrived}
    end = time.monotonic() + statement_timeout.LIMIT
    try:
        for query in _of_trace(record):
            found |= {message.pk: message for message in _read_until(end, query)}
        keys = [message.idempotency_key for message in found.values() if message != arrived]
        yield from _consumed(record, keys, records, end)
    except statement_timeout.OutOfTimeError:
        notes.append(
            gettext("Not all of its messages were found in time: the outbox is large, or the database is busy.")
        )
    for message in found.values():
        yield from _of_message(message, messages)
    notes.append(
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


def _of_trace(record: IdempotencyRecord) -> tuple[QuerySet[OutboxMessage], QuerySet[OutboxMessage]]:
    """:returns: the unsent messages of the record's trace, and those that were sent near its outcome."""
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


def _consumed(record: IdempotencyRecord, keys: list[str], records: DecisionAdmin, end: float) -> Iterator[Event]:
    """The records of consumers that claimed messages under the producer's account, as they do by default."""
    consumed = IdempotencyRecord.objects.using(record._state.db).filter(
        account_id=record.account_id, idempotency_key__in=keys
    )
    rows = consumed.order_by().values_list("pk", "operation", "status", "created_at")[:MAX_ROWS]
    for pk, operation, status, created_at in _read_until(end, rows):
        values = {"operation": operation, "status": status.replace("_", " ")}
        url = url_of(records, "change", pk)
        yield Event(created_at, gettext("A consumer, %(operation)s, claimed a message; now %(status)s.") % values, url)
