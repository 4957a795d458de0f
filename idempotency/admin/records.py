"""The admin: find a record by key or account, see at a glance what has become of it, and resolve one that is stuck.

Nothing is edited. What a person decides about a record goes through ``upkeep.resolutions``, after a page that shows
what it means, and with a permission of its own: ``idempotency.resolve_idempotencyrecord`` or
``idempotency.release_idempotencyrecord``.

Recorded responses may hold secrets. They are shown, and can be filtered on, by nobody without the permission
``idempotency.view_response_body``; of everything else ``idempotency.view_idempotencyrecord`` decides, as usual.

The table may be huge, so nothing here counts it whole, sorts it by a column without an index or lists its operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse

from ..lifecycle import Status
from ..models import IdempotencyRecord, RecordQuerySet
from ..operation import registry
from ..protocol.claims import alias
from . import messages  # noqa: F401 - registers the outbox
from .decisions import MARK_NOT_EXECUTED, RECORD_OUTCOME, RELEASE, Decision
from .display import NONE, ReadOnlyAdmin, StateFilter, preformatted, time_left, written

_RESPONSE_FIELDS = ("response_headers", "response_body", "response_reference")

_STATES: dict[str, tuple[str, Callable[[RecordQuerySet], RecordQuerySet]]] = {
    "live": ("in progress, lease running", RecordQuerySet.live),
    "abandoned": ("in progress, lease over", RecordQuerySet.abandoned),
    "completed": ("completed", RecordQuerySet.completed),
    "recoverable": ("recoverable", RecordQuerySet.recoverable),
    "parked": ("parked: outcome unknown", RecordQuerySet.parked),
    "past_retention": ("past retention", RecordQuerySet.past_retention),
}


class RecordStateFilter(StateFilter):
    states = _STATES


class OperationFilter(admin.SimpleListFilter):
    """By the operations that are declared. The names in the table would take a scan of it to find."""

    title = "operation"
    parameter_name = "operation"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        return [(name, name) for name in sorted(operation.name for operation in registry)]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        name = self.value()
        return queryset if name is None else queryset.filter(operation=name)


@admin.register(IdempotencyRecord)
class IdempotencyRecordAdmin(ReadOnlyAdmin):
    list_display = ("idempotency_key", "account_id", "operation", "state", "attempt", "age", "lease", "retention")
    list_filter = (RecordStateFilter, OperationFilter)
    search_fields = ("idempotency_key", "account_id")  # how they are searched: get_search_results()
    search_help_text = (
        'A key, an account, or "account key", which is the fastest. If there is none like it: the beginning of a key.'
    )
    ordering = ("-id",)
    sortable_by = ("retention",)
    actions = ("mark_not_executed", "record_outcome", "release")

    @admin.action(description="Mark as not executed", permissions=["resolve"])
    def mark_not_executed(self, request: HttpRequest, queryset: QuerySet[IdempotencyRecord]) -> HttpResponse | None:
        return Decision(self, request, MARK_NOT_EXECUTED).respond(queryset)

    @admin.action(description="Record an outcome", permissions=["resolve"])
    def record_outcome(self, request: HttpRequest, queryset: QuerySet[IdempotencyRecord]) -> HttpResponse | None:
        return Decision(self, request, RECORD_OUTCOME).respond(queryset)

    @admin.action(description="Release", permissions=["release"])
    def release(self, request: HttpRequest, queryset: QuerySet[IdempotencyRecord]) -> HttpResponse | None:
        return Decision(self, request, RELEASE).respond(queryset)

    def has_resolve_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("idempotency.resolve_idempotencyrecord")

    def has_release_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("idempotency.release_idempotencyrecord")

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest) -> bool:
        # By default any column can be filtered on in the URL, and response_body__startswith would tell, one letter at
        # a time, what may not be shown.
        return lookup in {"account_id", "idempotency_key", "operation", "state"}

    def get_queryset(self, request: HttpRequest) -> QuerySet[IdempotencyRecord]:
        # From the database that is written to: a replica may show a lease that was renewed as over. Responses, up to a
        # megabyte each, are only loaded where they are shown.
        records: QuerySet[IdempotencyRecord] = super().get_queryset(request).using(alias())
        return records.annotate(database_time=Now()).defer(*_RESPONSE_FIELDS)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Whole values first, so that an index can answer; only then the beginning of a key, as logs show it.

        The unique index leads with account_id. A key alone is found by walking that index, not the table.
        """
        term = search_term.strip()
        if not term:
            return queryset, False
        whole = Q(account_id=term)
        account, *key = term.rsplit(maxsplit=1)
        # A key has no white space in it. An account may.
        whole |= Q(account_id=account, idempotency_key=key[0]) if key else Q(idempotency_key=term)
        found = queryset.filter(whole)
        if not found.exists():
            found = queryset.filter(idempotency_key__startswith=term.partition("…")[0])
        return found, False

    def get_fieldsets(self, request: HttpRequest, obj: IdempotencyRecord | None = None) -> Any:
        response = ["response_status"]
        if request.user.has_perm("idempotency.view_response_body"):
            response += ["headers", "reference", "body"]
        return [
            (None, {"fields": ["account_id", "operation", "idempotency_key", "request_hash"]}),
            ("State", {"fields": ["state", "attempt", "age", "lease", "retention"]}),
            ("Times", {"fields": ["created_at", "completed_at", "lease_expires_at", "expires_at"]}),
            ("Response", {"fields": response}),
        ]

    @admin.display(description="state")
    def state(self, record: IdempotencyRecord) -> str:
        if record.status == Status.COMPLETED:
            return f"completed, {record.response_status}"
        if record.status == Status.IN_PROGRESS:
            return _STATES["live" if time_left(record, record.lease_expires_at) > timedelta(0) else "abandoned"][0]
        return _STATES["parked" if record.status == Status.PARKED else "recoverable"][0]

    @admin.display(description="age")
    def age(self, record: IdempotencyRecord) -> str:
        return written(-time_left(record, record.created_at))

    @admin.display(description="lease")
    def lease(self, record: IdempotencyRecord) -> str:
        if record.status != Status.IN_PROGRESS or record.lease_expires_at is None:
            return NONE
        left = time_left(record, record.lease_expires_at)
        return f"{written(left)} left" if left > timedelta(0) else f"over for {written(-left)}"

    @admin.display(description="retention", ordering="expires_at")
    def retention(self, record: IdempotencyRecord) -> str:
        left = time_left(record, record.expires_at)
        return f"{written(left)} left" if left > timedelta(0) else f"over for {written(-left)}"

    @admin.display(description="headers")
    def headers(self, record: IdempotencyRecord) -> str:
        return preformatted("\n".join(f"{name}: {value}" for name, value in record.response_headers or ()))

    @admin.display(description="reference")
    def reference(self, record: IdempotencyRecord) -> str:
        return preformatted(record.response_reference)

    @admin.display(description="body")
    def body(self, record: IdempotencyRecord) -> str:
        return preformatted(record.response_body)
