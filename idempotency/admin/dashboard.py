"""The dashboard: what has happened in the last hours, what is stuck, and whether upkeep does its work.

All of it is read with a bounded number of rows, and only for people who may view records. What concerns messages needs
the permission to view messages. The tables need no JavaScript. The chart is drawn from the same numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import MessageStatus, OutboxMessage
from ..outbox.backlog import Backlog, backlog
from ..protocol.transactions import alias
from ..upkeep.counters import PURGE_ENDED, PURGED, counters, this_hour
from ..upkeep.stats import Number, Precision, Stats, stats
from .decisions import DecisionAdmin
from .display import AnyModelAdmin, format_duration, url_of

#: Hours that the page shows, with the running one.
HOURS = 25

#: The last hour is the running one and the one before it. That is never less than an hour.
LAST_HOURS = 2

#: The rows of each kind that the page lists. The lists behind the links have all of them.
MAX_ROWS = 10

#: The operations that the page lists, those with the most events first.
MAX_OPERATIONS = 50

#: The events that the page shows, in this order.
EVENTS: Mapping[str, Any] = {
    "claimed": _("executions"),
    "replayed": _("replays"),
    "conflicted": _("conflicts (409)"),
    "key_reused": _("reused keys (422)"),
    "taken_over": _("take-overs"),
    "released": _("failures"),
    "parked": _("parked"),
}


class DashboardMixin(AnyModelAdmin):
    """Adds the dashboard to the admin of records."""

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(self.dashboard_view)
        return [path("dashboard/", view, name="idempotency_dashboard"), *super().get_urls()]

    def dashboard_view(self, request: HttpRequest) -> HttpResponse:
        """Show the page.

        :raises PermissionDenied: the person may not view records.
        """
        if not self.has_view_permission(request):
            raise PermissionDenied
        context = {
            **self.admin_site.each_context(request),
            "title": gettext("Idempotency: dashboard"),
            "opts": self.opts,
            "media": self.media,
            "checkbox_name": ACTION_CHECKBOX_NAME,
            **_what_happened(),
            **_what_the_table_holds(read := stats()),
        }
        stuck = _stuck_records(self, request, read)
        messages = self.admin_of_messages()
        if messages is not None and messages.has_view_permission(request):
            waiting = backlog()
            stuck.append(_dead_messages(messages, request, waiting.dead))
            context["outbox"] = _what_the_outbox_holds(waiting, _list_url(messages, state="due"))
        context["stuck"] = stuck
        return TemplateResponse(request, "admin/idempotency/dashboard.html", context)

    def admin_of_messages(self) -> DecisionAdmin | None:
        """The admin of messages, unless this site has none or the project has replaced it by another one."""
        if not self.admin_site.is_registered(OutboxMessage):
            return None
        messages: Any = self.admin_site.get_model_admin(OutboxMessage)
        return messages if isinstance(messages, DecisionAdmin) else None


# What has happened


@dataclass(frozen=True)
class Line:
    """One event or operation, and its counts."""

    label: Any
    counts: list[str]


def _what_happened() -> dict[str, Any]:
    now = this_hour()
    first = now - HOURS + 1
    hours = counters.read_hours(alias(), first)
    by_hour = {hour: sum(hours.get(hour, {}).values(), Counter()) for hour in range(first, now + 1)}
    last_hour = sum((by_hour[hour] for hour in range(now - LAST_HOURS + 1, now + 1)), Counter())
    last_day = sum(by_hour.values(), Counter())
    by_operation: dict[str, Counter[str]] = {}
    for operations in hours.values():
        for operation, counted in operations.items():
            by_operation.setdefault(operation, Counter()).update(counted)
    busiest = sorted(by_operation.items(), key=lambda item: (-item[1].total(), item[0]))
    ended = max((hour for hour, counted in by_hour.items() if counted[PURGE_ENDED]), default=None)
    return {
        "hour_since": _start_of(now - LAST_HOURS + 1),
        "day_since": _start_of(first),
        "events": [Line(label, _shown(last_hour[event], last_day[event])) for event, label in EVENTS.items()],
        "event_labels": list(EVENTS.values()),
        "operations": [
            Line(operation or gettext("(unknown where it was settled)"), _shown(*(seen[one] for one in EVENTS)))
            for operation, seen in busiest[:MAX_OPERATIONS]
            if any(seen[one] for one in EVENTS)
        ],
        # At most so much, because the retry of a released claim counts as an execution and adds no record.
        "growth": f"≤ {last_day['claimed'] - last_day[PURGED]:+,}",
        "purged": f"{last_day[PURGED]:,}",
        "purge_ended": None if ended is None else _start_of(ended),
        "chart": {
            "hours": [hour * 3600 for hour in by_hour],
            "series": [[str(label), [by_hour[hour][event] for hour in by_hour]] for event, label in EVENTS.items()],
        },
    }


def _shown(*counts: int) -> list[str]:
    return [f"{count:,}" for count in counts]


def _start_of(hour: int) -> datetime:
    return datetime.fromtimestamp(hour * 3600, timezone.utc)


# What the tables hold


def _what_the_table_holds(read: Stats) -> dict[str, Any]:
    size = read.table_bytes.value
    overdue = read.overdue.value or 0
    return {
        "numbers": [
            (_("records"), _tell(read.records)),
            (_("in progress"), _tell(read.in_progress)),
            (_("recoverable, waiting for a retry"), _tell(read.recoverable)),
            (_("longest overdue"), format_duration(timedelta(seconds=overdue))),
            (_("size with indexes"), gettext("unknown") if size is None else f"{size / 1e6:,.1f} MB"),
        ],
        "nobody_recovers": overdue > 300,
    }


def _tell(number: Number) -> str:
    signs = {Precision.AT_LEAST: "≥ ", Precision.ESTIMATE: "≈ "}
    return f"{signs.get(number.kind, '')}{number.value:,}"


def _what_the_outbox_holds(read: Backlog, url: str) -> dict[str, Any]:
    oldest = read.oldest_due
    return {
        "pending": f"{read.pending:,}",
        "oldest_due": None if oldest is None else format_duration(oldest),
        "nobody_relays": oldest is not None and oldest > timedelta(minutes=1),
        "url": url,
    }


# What is stuck


@dataclass(frozen=True)
class Stuck:
    """Rows that wait for somebody, the first of them with what may be decided about them."""

    title: Any
    count: str
    #: The list that shows all of them.
    url: str
    #: How many there are of each operation, with the list that shows those.
    operations: list[tuple[str, int, str]]
    rows: list[StuckRow]
    decide_url: str


@dataclass(frozen=True)
class StuckRow:
    pk: int
    title: str
    url: str
    detail: str
    badge: Any
    #: The decisions that this person may make about it.
    offered: list[Any]


def _stuck_records(shown: Any, request: HttpRequest, read: Stats) -> list[Stuck]:
    records = shown.get_queryset(request)
    abandoned = records.abandoned().order_by("lease_expires_at")
    kinds: list[tuple[Any, Number, str, QuerySet[Any]]] = [
        (_("Parked: somebody has to find out how these ended"), read.parked, "parked", records.parked().order_by()),
        (_("Abandoned: the next sweep settles these"), read.abandoned, "abandoned", abandoned),
    ]
    return [
        Stuck(
            title=title,
            count=_tell(number),
            url=_list_url(shown, state=state),
            operations=[
                (operation, count, _list_url(shown, state=state, operation=operation))
                for operation, count in sorted((number.by_operation or {}).items())
            ],
            rows=[_row(shown, request, record, record.operation) for record in found[:MAX_ROWS]],
            decide_url=_list_url(shown),
        )
        for title, number, state, found in kinds
    ]


def _dead_messages(shown: Any, request: HttpRequest, dead: int) -> Stuck:
    found = shown.get_queryset(request).filter(status=MessageStatus.DEAD).order_by("next_try_at")
    return Stuck(
        title=_("Dead messages: mend the cause, then requeue them"),
        count=f"{dead:,}",
        url=_list_url(shown, state="dead"),
        operations=[],
        rows=[_row(shown, request, message, message.topic) for message in found[:MAX_ROWS]],
        decide_url=_list_url(shown),
    )


def _row(shown: Any, request: HttpRequest, row: Any, detail: str) -> StuckRow:
    permitted = shown.get_actions(request)
    return StuckRow(
        pk=row.pk,
        title=str(row.message_id if isinstance(row, OutboxMessage) else row.idempotency_key),
        url=url_of(shown, "change", row.pk),
        detail=detail,
        badge=shown.badge(row),
        offered=[one for one in shown.decisions if row.status in one.statuses and one.name in permitted],
    )


def _list_url(shown: Any, **filters: str) -> str:
    url = url_of(shown, "changelist")
    return f"{url}?{urlencode(filters)}" if filters else url
