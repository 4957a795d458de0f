"""The timeline on the page of a record: what the tables know of it, in the order of time.

No request writes anything for it. So it is made of the record's own times, its steps, the decisions in the admin's log
and the messages of the outbox. An event without a recorded time stands where it belongs, and the page says so.

Every query reads a bounded number of rows through an index. Messages have no index by account or key, so they are
looked for within a time limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.http import HttpRequest
from django.utils.text import Truncator
from django.utils.translation import gettext, ngettext

from ...admin.display import format_duration, time_left
from ...lifecycle import Status
from ...models import IdempotencyRecord, IdempotencyStep

#: The page lists this many steps, decisions and messages of each kind.
MAX_ROWS = 50

#: An error is shown up to this length. The whole is on the same page.
MAX_ERROR = 200  # characters


@dataclass(frozen=True)
class Event:
    """One line of the timeline."""

    #: The time by which it is sorted.
    place: datetime
    what: str
    url: str = ""
    #: Whether ``place`` is when it happened. Otherwise that is not recorded.
    is_dated: bool = True
    #: How long after the record's creation it happened.
    offset: str = ""


@dataclass
class Timeline:
    """The lines, and what a reader has to know of those that are missing."""

    events: list[Event] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def timeline_of(record: IdempotencyRecord, request: HttpRequest) -> Timeline:
    """Read the timeline of a record, as far as the person may see it, in no order and without its messages.

    :param record: annotated with ``database_time``.
    """
    timeline = Timeline()
    timeline.events += [*_of_record(record, request), *_steps(record, timeline), *_decisions(record)]
    return timeline


def in_order(record: IdempotencyRecord, timeline: Timeline) -> Timeline:
    """Sort the events, and say how long after the record's creation each one happened."""
    events = sorted(timeline.events, key=lambda event: event.place)
    timeline.events = [replace(event, offset=_offset(event.place - record.created_at)) for event in events]
    return timeline


def _offset(duration: timedelta) -> str:
    sign, length = ("-", -duration) if duration < timedelta(0) else ("+", duration)
    seconds = length.total_seconds()
    return f"{sign}{seconds:.3f} s" if seconds < 60 else f"{sign}{format_duration(length)}"


# The record and what belongs to it


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


def _steps(record: IdempotencyRecord, timeline: Timeline) -> Iterator[Event]:
    rows = IdempotencyStep.objects.using(record._state.db).filter(account_id=record.account_id, record_id=record.pk)
    # By name, because that is the order of the index. Only the rows that are shown are then read.
    steps = list(rows.order_by("name").values_list("name", "created_at")[: MAX_ROWS + 1])
    if len(steps) > MAX_ROWS:
        timeline.notes.append(gettext("Only %(count)d of its steps are listed.") % {"count": MAX_ROWS})
    for name, created_at in steps[:MAX_ROWS]:
        yield Event(created_at, gettext("The result of step “%(name)s” was stored.") % {"name": name})


def _decisions(record: IdempotencyRecord) -> Iterator[Event]:
    entries = LogEntry.objects.filter(
        content_type=ContentType.objects.get_for_model(record), object_id=str(record.pk)
    ).select_related("user")
    for entry in entries.order_by("-action_time")[:MAX_ROWS]:
        yield Event(entry.action_time, f"{entry.user}: {entry.get_change_message()}")
