"""Records in the admin: find a record by key or account, view its state, and resolve a stuck one.

Decisions call ``operate.resolutions`` and have separate permissions. Recorded responses may hold secrets, so they need
the permission ``view_response_body`` and can't be filtered on.

The table may be huge, so no page counts it or sorts it by a column without an index, and every query of the list has a
time limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import F, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..bodies import BODY_GONE, UNREADABLE, decrypt_body
from ..lifecycle import Status
from ..models import IdempotencyRecord, RecordQuerySet
from ..operation import registry
from ..options.validators import MAX_NAME_LENGTH
from ..store import records_database, statement_timeout
from .actions import FORGET, MARK_NOT_EXECUTED, RECORD_OUTCOME, RELEASE, has_live_lease
from .decisions import Action, DecisionAdmin
from .display import (
    MAX_LISTED,
    NONE,
    StateFilter,
    format_time_left,
    show_badge,
    show_code,
    show_key,
    show_text,
    show_with_detail,
    time_left,
)
from .sections import join_sections
from .timeline import show_derived_keys, timeline_of

#: The maximum number of results of a search for a key without an account.
MAX_FOUND = 100

#: The states in the index ``idempotency_record_unfinished``.
_UNFINISHED = (Status.IN_PROGRESS, Status.RECOVERABLE, Status.PARKED)

#: The order of each state that an index finds: the order of the index. Ordered by id, the database would sort all rows
#: of the state, or read the table to find them. A claim whose lease ends first comes first.
_ORDERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("live", "abandoned", "recoverable", "parked"), ("lease_expires_at", "-id")),
    "past_retention": ("-expires_at", "-id"),
}

#: The kind of badge of each state. A live claim needs no attention.
_BADGES = {"abandoned": "waiting", "completed": "done", "recoverable": "waiting", "parked": "stuck"}


class RecordStateFilter(StateFilter):
    states: ClassVar[Mapping[str, tuple[Any, Callable[[Any], Any]]]] = {
        "live": (_("in progress, lease running"), RecordQuerySet.live),
        "abandoned": (_("in progress, lease over"), RecordQuerySet.abandoned),
        "completed": (_("completed"), RecordQuerySet.completed),
        "recoverable": (_("recoverable"), RecordQuerySet.recoverable),
        "parked": (_("parked"), RecordQuerySet.parked),
        "past_retention": (_("past retention"), RecordQuerySet.past_retention),
    }


class OperationFilter(admin.SimpleListFilter):
    """Filters by an operation declared in this process. Listing the table's operations would read the whole table."""

    title: Any = _("operation")
    parameter_name: str = "operation"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        names = {operation.name for operation in registry}
        names |= {name for name in request.GET.getlist(self.parameter_name) if name}
        return [(name, name) for name in sorted(names)]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        name = self.value()
        return queryset if name is None else queryset.filter(operation=name)


@admin.register(IdempotencyRecord)
class IdempotencyRecordAdmin(DecisionAdmin):
    list_display: tuple[str, ...] = ("key", "state_with_details", "subject", "age", "retention")
    list_filter: ClassVar[tuple[type[admin.SimpleListFilter], ...]] = (RecordStateFilter, OperationFilter)
    # Shows the search box. get_search_results() searches.
    search_fields: ClassVar[tuple[str, ...]] = ("idempotency_key", "account_id")
    search_help_text: ClassVar[Any] = _(
        'An account, "account key", or a key. The beginning of a key suffices. Case matters. In a large table, only '
        "unfinished records are found by a key alone."
    )
    ordering: ClassVar[tuple[str, ...]] = ("-id",)
    too_slow: ClassVar[Any] = _(
        "The table is too large or too busy to find these records in time. Choose a state of unfinished records, or "
        'search for "account key".'
    )
    decisions: ClassVar[tuple[Action, ...]] = (RECORD_OUTCOME, MARK_NOT_EXECUTED, RELEASE, FORGET)
    actions: tuple[Callable[..., HttpResponse | None], ...] = tuple(action.as_admin_action() for action in decisions)
    page_fields: ClassVar[tuple[str, ...]] = ("whole_key", "trace", "subject", "situation", "timeline", "derived_keys")
    attempt_column = "attempt"
    hidden_columns: ClassVar[tuple[str, ...]] = ("response_headers", "response_body", "response_reference", "error")
    allowed_lookups: ClassVar[frozenset[str]] = frozenset({"account_id", "idempotency_key", "operation", "state"})

    def __init__(self, model: type[IdempotencyRecord], admin_site: admin.AdminSite) -> None:
        super().__init__(model, admin_site)
        join_sections(admin_site)

    def database(self) -> str:
        return records_database()

    def decision_columns(self, request: HttpRequest) -> tuple[str, ...]:
        return ("whole_key", "operation", "account_id", "state", "attempt", "age", "lease")

    def page_columns(self, request: HttpRequest) -> tuple[str, ...]:
        may_read = request.user.has_perm("idempotency.view_response_body")
        response = ("headers", "reference", "body", "last_error") if may_read else ()
        return ("request_hash", "age", "retention", *response)

    def explain(self, row: IdempotencyRecord) -> SafeString:
        operation = registry.get(row.operation)
        context = {
            "original": row,
            "statuses": list(Status),
            "recovery": "" if operation is None else operation.recovery.name,
            "is_live": has_live_lease(row),
            "is_over": row.status != Status.IN_PROGRESS and time_left(row, row.expires_at) <= timedelta(0),
            "body_gone": BODY_GONE,
        }
        return render_to_string("idempotency/explanation.html", context)

    @admin.display(description=_("key"))
    def whole_key(self, record: IdempotencyRecord) -> str:
        return show_code(record.idempotency_key)

    @admin.display(description=_("trace"))
    def trace(self, record: IdempotencyRecord) -> str:
        return show_code(record.scope.trace)

    @admin.display(description=_("timeline"))
    def timeline(self, record: IdempotencyRecord) -> str:
        request: Any = record.request  # type: ignore[attr-defined]
        return render_to_string("idempotency/timeline.html", timeline_of(record, request, self))

    @admin.display(description=_("derived keys"))
    def derived_keys(self, record: IdempotencyRecord) -> str:
        request: Any = record.request  # type: ignore[attr-defined]
        return show_derived_keys(record, *request.GET.getlist("call"))

    def has_resolve_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("idempotency.resolve_idempotencyrecord")

    def has_release_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("idempotency.release_idempotencyrecord")

    def has_forget_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("idempotency.forget_idempotencyrecord")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        # Logs show the beginning of a key, followed by an ellipsis.
        term = search_term.strip().partition("…")[0]
        return (self._find(request, queryset, term) if term else queryset), False

    def _find(self, request: HttpRequest, queryset: QuerySet[Any], term: str) -> QuerySet[Any]:
        """Try one search after another, because an OR costs as much as its most expensive operand."""
        of_account = _of_account(queryset, term)
        if of_account.exists():
            return _newest_first(of_account)
        account, *key = term.rsplit(maxsplit=1)  # an account may contain white space, a key never does
        if key:
            return _find_key_of_account(_of_account(queryset, account), key[0])
        return self._find_key(request, queryset, term)

    def _find_key(self, request: HttpRequest, queryset: QuerySet[Any], key: str) -> QuerySet[Any]:
        """Up to ``MAX_FOUND`` records whose key begins with ``key``.

        No index begins with the key. So the unfinished records are searched first, in their small index, and the whole
        table only within the time limit, which suffices if the project adds an index on the key.
        """
        matching = queryset.filter(idempotency_key__startswith=key)
        gave_up = False
        for records in (matching.filter(status__in=_UNFINISHED), matching):
            # Unordered, because the database might follow the index of the order and read the whole table.
            found = records.order_by().values_list("pk", flat=True)[:MAX_FOUND]
            try:
                with statement_timeout.time_limit(queryset.db):
                    pks = list(found)
            except statement_timeout.OutOfTimeError:
                gave_up = True
                continue
            if pks:
                return queryset.filter(pk__in=pks)
        if gave_up:
            text = gettext(
                "The table is too large to be searched for a key alone. No unfinished record has this key. "
                'Search for "account key".'
            )
            self.warn(request, text)
        return queryset.none()

    def get_ordering(self, request: HttpRequest) -> Any:
        return _ORDERS.get(request.GET.get(RecordStateFilter.parameter_name, ""), self.ordering)

    @admin.display(description=_("key"))
    def key(self, record: IdempotencyRecord) -> str:
        return show_key(record.idempotency_key)

    @admin.display(description=_("state"))
    def state(self, record: IdempotencyRecord) -> str:
        name: str = record.status
        if record.status == Status.IN_PROGRESS:
            name = "live" if has_live_lease(record) else "abandoned"
        label, _filter = RecordStateFilter.states.get(name, (name, None))
        if record.status == Status.COMPLETED:
            label = f"{label}, {record.response_status}"
        return show_badge(_BADGES.get(name, ""), label)

    def details(self, record: IdempotencyRecord) -> list[str]:
        lease = self.lease(record)
        attempt = gettext("attempt %(attempt)d") % {"attempt": record.attempt} if record.attempt > 1 else ""
        return [attempt, "" if lease == NONE else lease]

    @admin.display(description=_("operation"))
    def subject(self, record: IdempotencyRecord) -> str:
        account = gettext("account %(account)s") % {"account": record.account_id}
        return show_with_detail(record.operation, account)

    @admin.display(description=_("lease"))
    def lease(self, record: IdempotencyRecord) -> str:
        if record.status != Status.IN_PROGRESS or record.lease_expires_at is None:
            return NONE
        return format_time_left(time_left(record, record.lease_expires_at))

    @admin.display(description=_("retention"))
    def retention(self, record: IdempotencyRecord) -> str:
        return format_time_left(time_left(record, record.expires_at))

    def advice(self, request: HttpRequest, action: Action, rows: Sequence[Any]) -> SafeString:
        """For an outcome: what is missing without the handler, the derived keys, and an outcome to compare with."""
        if action is not RECORD_OUTCOME or not rows:
            return super().advice(request, action, rows)
        (record,) = rows
        latest = self._latest_outcome(record) if request.user.has_perm("idempotency.view_response_body") else None
        shown = latest and (latest.response_status, self.body(latest))
        context = {"keys": show_derived_keys(record), "latest": shown}
        return render_to_string("idempotency/outcome_advice.html", context)

    def _latest_outcome(self, record: IdempotencyRecord) -> IdempotencyRecord | None:
        """The latest outcome of the record's operation, if it is found in time: no index begins with the operation."""
        completed = IdempotencyRecord.objects.using(self.database()).filter(
            status=Status.COMPLETED, operation=record.operation
        )
        try:
            with statement_timeout.time_limit(completed.db):
                return completed.order_by("-pk").first()
        except statement_timeout.OutOfTimeError:
            return None

    @admin.display(description=_("headers"))
    def headers(self, record: IdempotencyRecord) -> str:
        # A newer release may have written them in a different form.
        return show_text("\n".join(": ".join(header) for header in record.response_headers or ()))

    @admin.display(description=_("reference"))
    def reference(self, record: IdempotencyRecord) -> str:
        return show_text(record.response_reference)

    @admin.display(description=_("body"))
    def body(self, record: IdempotencyRecord) -> str:
        try:
            return show_text(decrypt_body(record.response_body))
        except UNREADABLE as error:
            return show_text(str(error))


def _of_account(records: QuerySet[Any], account: str) -> QuerySet[Any]:
    """The account's records. Citus rejects a statement with an account that is longer than its column."""
    return records.filter(account_id=account) if len(account) <= MAX_NAME_LENGTH else records.none()


def _newest_first(of_account: QuerySet[Any]) -> QuerySet[Any]:
    """Order an account's records by id, without the index on ids if the account has few of them.

    If they are all old, the database would otherwise read most of the table, backwards, to find a page of them.
    """
    has_many = of_account.order_by()[MAX_LISTED : MAX_LISTED + 1].exists()
    return of_account if has_many else of_account.order_by((F("pk") + 0).desc())


def _find_key_of_account(of_account: QuerySet[Any], key: str) -> QuerySet[Any]:
    """The account's records with a key, or whose key begins with it.

    The operation precedes the key in the index, so the declared operations are tried before the whole account is read.
    """
    declared = of_account.filter(operation__in=[operation.name for operation in registry])
    for found in (declared.filter(idempotency_key=key), declared.filter(idempotency_key__startswith=key)):
        if found.exists():
            return found
    return of_account.filter(idempotency_key__startswith=key)
