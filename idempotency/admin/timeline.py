"""The timeline on the page of a record.

An ordinary request writes nothing for it. It consists of the record's times, its history, its steps, the decisions in
the admin's log, and events of extensions, such as messages. Every query reads a bounded number of rows through an
index.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.http import HttpRequest
from django.template.loader import render_to_string
from django.utils.safestring import SafeString
from django.utils.timezone import get_default_timezone, is_naive, make_naive
from django.utils.translation import gettext

from ..extensions import Event, extensions
from ..lifecycle import Status
from ..models import IdempotencyRecord, IdempotencyStep
from ..operation import registry
from .decisions import DecisionAdmin
from .display import format_duration, time_left

#: The maximum number of listed steps, decisions and messages of each kind.
MAX_ROWS = 50


def timeline_of(record: IdempotencyRecord, request: HttpRequest, records: DecisionAdmin) -> dict[str, Any]:
    """Read the parts of a record's timeline that the user may view.

    :param record: annotated with ``database_time``.
    :param records: the admin of records.
    :returns: ``events``, each with its time since the record's creation, and ``notes`` about missing events.
    """
    notes: list[str] = []
    events = [*_of_record(record), *_steps(record, notes), *_decisions(record)]
    for each in extensions():
        if each.record_events:
            events += each.record_events(record, request, records, notes)
    events.sort(key=lambda event: event.time)
    return {"events": [(event, _offset(event.time - record.created_at)) for event in events], "notes": notes}


def _offset(duration: timedelta) -> str:
    sign, length = ("-", -duration) if duration < timedelta(0) else ("+", duration)
    seconds = length.total_seconds()
    return f"{sign}{seconds:.3f} s" if seconds < 60 else f"{sign}{format_duration(length)}"


def _of_record(record: IdempotencyRecord) -> Iterator[Event]:
    values = {"attempt": record.attempt, "status": record.response_status}
    yield Event(record.created_at, gettext("The request was claimed for the first time."))
    for entry in record.history or []:
        yield Event(_time_of(entry), _describe(entry))
    if record.completed_at is not None:
        yield Event(record.completed_at, gettext("Attempt %(attempt)d was completed with status %(status)s.") % values)
    elif record.status == Status.IN_PROGRESS and record.lease_expires_at is not None:
        if time_left(record, record.lease_expires_at) > timedelta(0):
            lease = gettext("The lease of attempt %(attempt)d ends, unless it is renewed.")
        else:
            lease = gettext("The lease of attempt %(attempt)d ended without an outcome.")
        yield Event(record.lease_expires_at, lease % values)
    is_over = time_left(record, record.expires_at) <= timedelta(0)
    yield Event(record.expires_at, gettext("The retention ended.") if is_over else gettext("The retention ends."))


def _describe(entry: dict[str, Any]) -> str:
    texts = {
        "released": gettext("Attempt %(attempt)s failed and was released, so that a retry runs: %(why)s"),
        "parked": gettext("Attempt %(attempt)s failed and was parked, because its effect is unknown: %(why)s"),
        "session_over": gettext("The database session of attempt %(attempt)s was gone, so its lease ended."),
        "lease_over": gettext("The lease was over without an outcome, and a retry or a sweep settled the claim."),
        "taken_over": gettext("Attempt %(attempt)s began. The previous one was released, or its lease was over."),
        "started_over": gettext("Attempt %(attempt)s began as a new request, because the retention was over."),
    }
    # A newer release may have written an unknown event.
    text: str = texts.get(entry["event"], entry["event"])
    why = entry.get("why", gettext("its response is not recorded, or it released its claim."))
    return text % {"attempt": entry.get("attempt", ""), "why": why}


def _time_of(entry: dict[str, Any]) -> datetime:
    """The time of an entry, aware or naive like a record's other times. Only PostgreSQL writes its offset."""
    written = datetime.fromisoformat(entry["at"])
    moment = written.replace(tzinfo=UTC) if is_naive(written) else written
    return moment if settings.USE_TZ else make_naive(moment, get_default_timezone())


def _steps(record: IdempotencyRecord, notes: list[str]) -> Iterator[Event]:
    steps = _first_steps(record)
    if len(steps) > MAX_ROWS:
        notes.append(gettext("Only %(count)d of its steps are listed.") % {"count": MAX_ROWS})
    for name, created_at in steps[:MAX_ROWS]:
        yield Event(created_at, gettext("The result of step “%(name)s” was stored.") % {"name": name})


def show_derived_keys(record: IdempotencyRecord, *calls: str) -> SafeString:
    """The derived keys of the record's steps, of calls that this process has made, and of ``calls``."""
    operation = registry.get(record.operation)
    known = () if operation is None else tuple(operation.calls)
    steps = [name for name, _ in _first_steps(record)[:MAX_ROWS]]
    names = dict.fromkeys([*steps, *known, *filter(None, calls)])
    keys = [(name, record.derive_key(name), record.derive_text(name)) for name in names]
    return render_to_string("idempotency/derived_keys.html", {"keys": keys})


def _first_steps(record: IdempotencyRecord) -> list[tuple[str, datetime]]:
    rows = IdempotencyStep.objects.using(record._state.db).filter(account_id=record.account_id, record_id=record.pk)
    # Ordered by name, as the index is, so that no other rows are read.
    return list(rows.order_by("name").values_list("name", "created_at")[: MAX_ROWS + 1])


def _decisions(record: IdempotencyRecord) -> Iterator[Event]:
    entries = LogEntry.objects.filter(
        content_type=ContentType.objects.get_for_model(record), object_id=str(record.pk)
    ).select_related("user")
    for entry in entries.order_by("-action_time")[:MAX_ROWS]:
        yield Event(entry.action_time, f"{entry.user}: {entry.get_change_message()}")
