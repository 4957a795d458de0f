"""The dashboard in the admin: alarms, stuck rows, the events of the last day, and the tables.

Every query reads a bounded number of rows. The page needs the permission to view records; messages need the permission
to view them. Only the chart needs JavaScript.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from django.apps import apps
from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ...admin.decisions import DecisionAdmin, admin_of
from ...admin.display import ReadOnlyAdmin, explaining_broken_tables, format_duration, show_key, url_of
from ...models import IdempotencyRecord
from ...operate.statistics import Number, Precision, Stats, purge_overdue, stats
from ...store import records_database
from .counting import counters, this_hour
from .models import IdempotencyCounter

#: The hours that the page covers, including the current one.
HOURS = 25

#: The maximum number of listed rows of each kind. The links lead to the full lists.
MAX_ROWS = 10

#: The maximum number of listed operations, busiest first.
MAX_OPERATIONS = 50

#: The events on the page, in this order.
EVENTS: Mapping[str, Any] = {
    "claimed": _("executions"),
    "replayed": _("replays"),
    "conflicted": _("conflicts (409)"),
    "key_reused": _("reused keys (422)"),
    "taken_over": _("take-overs"),
    "released": _("failures"),
    "parked": _("parked"),
}


def _admin_of_messages(site: admin.AdminSite, request: HttpRequest) -> DecisionAdmin | None:
    """The admin of messages, if there is an outbox and the user may view it."""
    if not apps.is_installed("idempotency.outbox"):
        return None
    from ...outbox.timeline import admin_of_messages

    return admin_of_messages(site, request)


@admin.register(IdempotencyCounter)
class DashboardAdmin(ReadOnlyAdmin):
    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(self.changelist_view)
        # The admin's index links to the second name.
        names = ("idempotency_dashboard", f"{self.opts.app_label}_{self.opts.model_name}_changelist")
        return [path("", view, name=name) for name in names]

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm("idempotency.view_idempotencyrecord")

    @explaining_broken_tables
    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        context = {
            **self.admin_site.each_context(request),
            "title": gettext("Idempotency: dashboard"),
            "opts": self.opts,
            "media": self.media,
            "checkbox_name": ACTION_CHECKBOX_NAME,
            **_events(),
            **_table_of_records(read := stats()),
            "stuck": [],
        }
        records = admin_of(self.admin_site, IdempotencyRecord)
        if records is not None:
            context["stuck"] += _stuck_records(records, request, read)
        messages = _admin_of_messages(self.admin_site, request)
        if messages is not None:
            dead, context["outbox"] = _outbox(messages, request)
            context["stuck"].append(dead)
        context["stuck"] = [kind for kind in context["stuck"] if kind["rows"]]
        return TemplateResponse(request, "idempotency_dashboard/dashboard.html", context)


# Events


def _events() -> dict[str, Any]:
    now = this_hour()
    first = now - HOURS + 1
    read = counters.read_hours(records_database(), first)
    by_hour = {hour: sum(read.get(hour, {}).values(), Counter()) for hour in range(first, now + 1)}
    by_operation: dict[str, Counter[str]] = {}
    for operations in read.values():
        for operation, counted in operations.items():
            by_operation.setdefault(operation, Counter()).update(counted)
    busiest = sorted(by_operation.items(), key=lambda item: (-item[1].total(), item[0]))
    total = sum(by_hour.values(), Counter())
    return {
        "since": datetime.fromtimestamp(first * 3600, UTC),
        "events": [(label, f"{total[event]:,}") for event, label in EVENTS.items()],
        "operations": [
            (
                operation or gettext("(not known)"),
                [(label, f"{counted[event]:,}") for event, label in EVENTS.items()],
            )
            for operation, counted in busiest[:MAX_OPERATIONS]
            if any(counted[event] for event in EVENTS)
        ],
        "chart": {
            "hours": [hour * 3600 for hour in by_hour],
            "series": [[str(label), [by_hour[hour][event] for hour in by_hour]] for event, label in EVENTS.items()],
        },
    }


# The tables


def _table_of_records(read: Stats) -> dict[str, Any]:
    size = read.table_bytes.value
    overdue, late = read.overdue.value or 0, purge_overdue()
    return {
        "numbers": {name: _approximate(getattr(read, name)) for name in ("records", "in_progress", "recoverable")},
        "overdue": format_duration(timedelta(seconds=overdue)),
        "size": None if size is None else f"{size / 1e6:,.1f} MB",
        "recovery_is_overdue": overdue > 300,
        "purge_overdue": format_duration(timedelta(seconds=late)),
        "purge_is_overdue": late > 24 * 3600,
    }


def _approximate(number: Number) -> str:
    signs = {Precision.AT_LEAST: "≥ ", Precision.ESTIMATE: "≈ "}
    return f"{signs.get(number.kind, '')}{number.value:,}"


# Stuck rows


def _stuck_records(shown: Any, request: HttpRequest, read: Stats) -> Iterator[dict[str, Any]]:
    records = shown.get_queryset(request)
    abandoned = records.abandoned().order_by("lease_expires_at")
    kinds: list[tuple[Any, Number, str, QuerySet[Any]]] = [
        (_("Parked: an operator has to find out how these ended"), read.parked, "parked", records.parked().order_by()),
        (_("Abandoned: the next sweep settles these"), read.abandoned, "abandoned", abandoned),
    ]
    for title, number, state, selected in kinds:
        operations = [
            (operation, count, _list_url(shown, state=state, operation=operation))
            for operation, count in sorted((number.by_operation or {}).items())
        ]
        stuck = _stuck(shown, request, title, state, _approximate(number), selected, "idempotency_key")
        yield {**stuck, "operations": operations}


def _stuck(
    shown: Any, request: HttpRequest, title: Any, state: str, count: str, selected: QuerySet[Any], key: str
) -> dict[str, Any]:
    """Rows that wait for a decision or a sweep. The first rows are listed with their possible decisions."""
    rows = [
        {
            "pk": row.pk,
            "key": show_key(str(getattr(row, key))),
            "url": url_of(shown, "change", row.pk),
            "columns": [shown.subject(row), shown.age(row)],
            "state": shown.state_with_details(row),
            "offered": shown.offered(request, row),
        }
        for row in selected[:MAX_ROWS]
    ]
    url = _list_url(shown, state=state)
    return {"title": title, "count": count, "url": url, "rows": rows, "decide_url": _list_url(shown)}


def _outbox(shown: Any, request: HttpRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    from ...outbox.models import MessageStatus
    from ...outbox.upkeep import backlog

    waiting = backlog()
    oldest = waiting.oldest_due
    messages = shown.get_queryset(request).filter(status=MessageStatus.DEAD).order_by("next_try_at")
    title = _("Dead messages: correct the cause, then requeue them")
    return _stuck(shown, request, title, "dead", f"{waiting.dead:,}", messages, "message_id"), {
        "pending": f"{waiting.pending:,}",
        "oldest_due": None if oldest is None else format_duration(oldest),
        "relay_is_overdue": oldest is not None and oldest > timedelta(minutes=1),
        "url": _list_url(shown, state="due"),
    }


def _list_url(shown: Any, **filters: str) -> str:
    url = url_of(shown, "changelist")
    return f"{url}?{urlencode(filters)}" if filters else url
