"""Records in the admin: find a record by key or account, see its state, and resolve a record that is stuck.

Nothing can be edited. A decision about a record calls ``upkeep.resolutions``. A page explains it first, and it needs a
permission of its own: ``idempotency.resolve_idempotencyrecord`` or ``idempotency.release_idempotencyrecord``.

Recorded responses may hold secrets, so only people with the permission ``idempotency.view_response_body`` see them, and
nobody can filter on them. Everything else needs ``idempotency.view_idempotencyrecord``, as usual.

The table may be huge. So no page here counts the whole table, sorts it by a column that has no index, or searches it
for the names of operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..lifecycle import Status
from ..models import IdempotencyCounter, IdempotencyRecord, RecordQuerySet
from ..operation import registry
from ..protocol.transactions import alias
from .actions import MARK_NOT_EXECUTED, RECORD_OUTCOME, RELEASE
from .dashboard import DashboardMixin
from .decisions import DecisionAdmin
from .display import (
    NONE,
    StateFilter,
    format_duration,
    format_time_left,
    show_badge,
    show_text,
    show_with_detail,
    time_left,
)
from .explanations import explain_record

_RESPONSE_FIELDS = ("response_headers", "response_body", "response_reference")

#: The filter takes this many operations from the table of counters. Nobody reads a longer list.
MAX_OPERATIONS = 500

_STATES: dict[str, tuple[Any, Callable[[RecordQuerySet], RecordQuerySet]]] = {
    "live": (_("in progress, lease running"), RecordQuerySet.live),
    "abandoned": (_("in progress, lease over"), RecordQuerySet.abandoned),
    "completed": (_("completed"), RecordQuerySet.completed),
    "recoverable": (_("recoverable"), RecordQuerySet.recoverable),
    "parked": (_("parked"), RecordQuerySet.parked),
    "past_retention": (_("past retention"), RecordQuerySet.past_retention),
}

#: The kind of badge, and so its colour, of each state. A live claim has no colour, because it needs no attention.
_BADGES = {"abandoned": "waiting", "completed": "done", "recoverable": "waiting", "parked": "stuck"}


class RecordStateFilter(StateFilter):
    states = _STATES


class OperationFilter(admin.SimpleListFilter):
    """Filters by an operation that is declared in this process or that any process has counted an event of.

    Finding the names in the table of records would read all of it. The table of counters has a few rows per operation.
    """

    title = _("operation")
    parameter_name = "operation"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        counted = IdempotencyCounter.objects.using(alias()).filter(hour=0).exclude(operation="")
        names = set(counted.order_by("operation").values_list("operation", flat=True).distinct()[:MAX_OPERATIONS])
        names |= {operation.name for operation in registry}
        names |= {name for name in request.GET.getlist(self.parameter_name) if name}
        return [(name, name) for name in sorted(names)]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        name = self.value()
        return queryset if name is None else queryset.filter(operation=name)


@admin.register(IdempotencyRecord)
class IdempotencyRecordAdmin(DashboardMixin, DecisionAdmin):
    list_display = ("idempotency_key", "state_and_lease", "who", "age", "retention")
    list_filter = (RecordStateFilter, OperationFilter)
    search_fields = ("idempotency_key", "account_id")  # shows the search box; get_search_results() does the search
    search_help_text = _(
        'An account, "account key", or a key, which is slow in a large table. If nothing matches, its beginning.'
    )
    ordering = ("-id",)
    sortable_by = ("retention",)
    decisions = (MARK_NOT_EXECUTED, RECORD_OUTCOME, RELEASE)
    actions = tuple(action.as_admin_action() for action in decisions)
    decision_columns = ("operation", "account_id", "idempotency_key", "state", "attempt", "age", "lease")
    attempt_column = "attempt"

    def explain(self, row: IdempotencyRecord) -> list[Any]:
        return explain_record(row)

    def badge(self, row: IdempotencyRecord) -> Any:
        return self.state(row)

    def has_resolve_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("idempotency.resolve_idempotencyrecord")

    def has_release_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("idempotency.release_idempotencyrecord")

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest) -> bool:
        # By default a URL can filter on any column. With response_body__startswith, somebody without the permission
        # could guess a hidden body letter by letter.
        return lookup in {"account_id", "idempotency_key", "operation", "state"}

    def get_queryset(self, request: HttpRequest) -> QuerySet[IdempotencyRecord]:
        # Read from the database that records are written to: a replica may show a renewed lease as over. A response
        # may have a megabyte, so responses are loaded only where they are shown.
        records: QuerySet[IdempotencyRecord] = super().get_queryset(request).using(alias())
        return records.annotate(database_time=Now()).defer(*_RESPONSE_FIELDS)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search for one thing after another, the cheapest first, because an OR costs as much as its most expensive
        part. The last one is the beginning of a key, which is what logs show.

        The unique index begins with account_id. To find a key alone, the database reads that index and not the table.
        """
        term = search_term.strip()
        if not term:
            return queryset, False
        account, *key = term.rsplit(maxsplit=1)
        searches = (
            Q(account_id=term),
            # A key never contains white space. An account may.
            Q(account_id=account, idempotency_key=key[0]) if key else Q(idempotency_key=term),
            Q(idempotency_key__startswith=term.partition("…")[0]),
        )
        found = queryset.none()
        for search in searches:
            if (found := queryset.filter(search)).exists():
                break
        return found, False

    def get_fieldsets(self, request: HttpRequest, obj: IdempotencyRecord | None = None) -> Any:
        response = ["response_status"]
        if request.user.has_perm("idempotency.view_response_body"):
            response += ["headers", "reference", "body"]
        return [
            (None, {"fields": ["account_id", "operation", "idempotency_key", "request_hash"]}),
            (_("State"), {"fields": ["attempt", "age", "lease", "retention"]}),
            (_("Times"), {"fields": ["created_at", "completed_at", "lease_expires_at", "expires_at"]}),
            (_("Response"), {"fields": response}),
        ]

    @admin.display(description=_("state"))
    def state(self, record: IdempotencyRecord) -> str:
        name: str = record.status
        if record.status == Status.IN_PROGRESS:
            name = "live" if time_left(record, record.lease_expires_at) > timedelta(0) else "abandoned"
        label = _STATES[name][0]
        if record.status == Status.COMPLETED:
            label = f"{label}, {record.response_status}"
        return show_badge(_BADGES.get(name, ""), label)

    @admin.display(description=_("state"))
    def state_and_lease(self, record: IdempotencyRecord) -> str:
        """State, attempt and lease in one column, because a screen has room for few columns."""
        lease, attempt = self.lease(record), ""
        if record.attempt > 1:
            attempt = gettext("attempt %(attempt)d") % {"attempt": record.attempt}
        return show_with_detail(self.state(record), attempt, "" if lease == NONE else lease)

    @admin.display(description=_("operation"))
    def who(self, record: IdempotencyRecord) -> str:
        account = gettext("account %(account)s") % {"account": record.account_id}
        return show_with_detail(record.operation, account)

    @admin.display(description=_("age"))
    def age(self, record: IdempotencyRecord) -> str:
        return format_duration(-time_left(record, record.created_at))

    @admin.display(description=_("lease"))
    def lease(self, record: IdempotencyRecord) -> str:
        if record.status != Status.IN_PROGRESS or record.lease_expires_at is None:
            return NONE
        return format_time_left(time_left(record, record.lease_expires_at))

    @admin.display(description=_("retention"), ordering="expires_at")
    def retention(self, record: IdempotencyRecord) -> str:
        return format_time_left(time_left(record, record.expires_at))

    @admin.display(description=_("headers"))
    def headers(self, record: IdempotencyRecord) -> str:
        return show_text("\n".join(f"{name}: {value}" for name, value in record.response_headers or ()))

    @admin.display(description=_("reference"))
    def reference(self, record: IdempotencyRecord) -> str:
        return show_text(record.response_reference)

    @admin.display(description=_("body"))
    def body(self, record: IdempotencyRecord) -> str:
        return show_text(record.response_body)
