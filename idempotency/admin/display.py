"""Presentation shared by the admin pages: badges, durations, long texts, bounded lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, cast

from django.contrib import admin, messages
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ORDER_VAR, PAGE_VAR, ChangeList
from django.core.paginator import Paginator
from django.db import DatabaseError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timezone import is_naive, localtime
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..options.validators import MAX_NAME_LENGTH
from ..protocol.ownership import misfit
from ..store import records_database, statement_timeout, store_for

if TYPE_CHECKING:
    AnyModelAdmin = admin.ModelAdmin[Any]
    AnyPaginator = Paginator[Any]
else:
    AnyModelAdmin = admin.ModelAdmin
    AnyPaginator = Paginator

_View = TypeVar("_View", bound=Callable[..., HttpResponse])

#: A list ends here, after a hundred pages. Later rows can be found by a search or a filter.
MAX_LISTED = 10_000

#: A longer body or payload is truncated.
MAX_SHOWN = 20_000  # characters

#: A list shortens longer keys.
MAX_KEY = 24  # characters

NONE = "–"


class BoundedPaginator(AnyPaginator):
    """Stops counting at ``MAX_LISTED``, because an exact count reads the whole table."""

    #: Whether the list is the whole table. Then it is counted from the newest id: a purge empties the other end, whose
    #: dead rows remain until a vacuum.
    is_whole = False

    @cached_property
    def count(self) -> int:
        rows = cast("QuerySet[Any]", self.object_list)
        return rows.order_by(*["-pk"] if self.is_whole else [])[:MAX_LISTED].count()


class BoundedList(ChangeList):
    """A list that is empty, with a warning, if one of its queries exceeds the time limit.

    It has one order, because an index on each column would slow down every request.
    """

    queryset: Any
    model_admin: Any
    #: Django sets it after the search, which may take too long.
    clear_all_filters_qs: str = "?"

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        values = [value for values in self.get_filters_params().values() for value in values]
        # PostgreSQL rejects NUL, and Citus rejects an account that is longer than its column.
        if any("\x00" in value or len(value) > MAX_NAME_LENGTH for value in values):
            raise IncorrectLookupParameters
        try:
            with statement_timeout.time_limit(self.root_queryset.db):
                return super().get_queryset(request, exclude_parameters)  # a search queries the table
        except statement_timeout.OutOfTimeError:
            return self._give_up(request)

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        # Django applies sortable_by to the links only. A URL could still sort by any column.
        self.params.pop(ORDER_VAR, None)
        return super().get_ordering(request, queryset)

    def get_results(self, request: HttpRequest) -> None:
        try:
            with statement_timeout.time_limit(self.queryset.db):
                super().get_results(request)
                len(self.result_list)  # reads the page's rows, and keeps them
        except statement_timeout.OutOfTimeError:
            self.queryset = self._give_up(request)
            super().get_results(request)

    def _give_up(self, request: HttpRequest) -> QuerySet[Any]:
        self.model_admin.warn(request, self.model_admin.too_slow)
        return self.root_queryset.none()


def explaining_broken_tables(view: _View) -> _View:
    """Decorates a view of a ``ModelAdmin``: if the tables are broken, it answers with the sentence that the log has."""

    @wraps(view)
    def explained(self: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        try:
            response = view(self, request, *args, **kwargs)
            return response.render() if hasattr(response, "render") else response  # which may query, too
        except DatabaseError as error:
            using = records_database()
            if not store_for(using).is_permanent(error):
                raise
            # Plain text, because a page of the admin queries the database, which a broken transaction refuses.
            return HttpResponse(misfit(using, error), status=503, content_type="text/plain; charset=utf-8")

    return cast("_View", explained)


class ReadOnlyAdmin(AnyModelAdmin):
    """The admin of a possibly huge table whose rows can't be edited."""

    list_per_page = 100
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # each facet counts the whole table
    paginator = BoundedPaginator
    sortable_by: ClassVar[tuple[str, ...]] = ()
    #: The warning above a list that could not be read in time.
    too_slow: ClassVar[Any] = _("The table is too large or too busy to list these rows in time. Try again later.")

    class Media:
        css: Final = {"all": ["idempotency/admin.css"]}

    def warn(self, request: HttpRequest, text: Any) -> None:
        if request.method == "GET":  # a submitted form queries the list again
            self.message_user(request, text, messages.WARNING)

    @explaining_broken_tables
    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        return super().changelist_view(request, extra_context)

    @explaining_broken_tables
    def changeform_view(
        self, request: HttpRequest, object_id: str | None = None, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        return super().changeform_view(request, object_id, form_url, extra_context)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return BoundedList

    def get_paginator(self, request: HttpRequest, *args: Any, **options: Any) -> BoundedPaginator:
        paginator: Any = super().get_paginator(request, *args, **options)
        paginator.is_whole = not request.GET.keys() - {PAGE_VAR, ORDER_VAR}
        return cast("BoundedPaginator", paginator)


def url_of(shown: admin.ModelAdmin[Any], view: str, *args: int) -> str:
    """The URL of a view in the admin site of ``shown``."""
    name = f"admin:{shown.opts.app_label}_{shown.opts.model_name}_{view}"
    return reverse(name, args=args, current_app=shown.admin_site.name)


class StateFilter(admin.SimpleListFilter):
    """Filters by a state that depends on more than one column."""

    title: Any = _("state")
    parameter_name: str = "state"
    #: The name of a state in the URL, its label, and the function that selects its rows.
    states: ClassVar[Mapping[str, tuple[Any, Callable[[Any], Any]]]]

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        return [(name, label) for name, (label, choose) in self.states.items()]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        _label, choose = self.states.get(self.value() or "", ("", None))
        return queryset if choose is None else choose(queryset)


def time_left(row: Any, until: datetime | None) -> timedelta:
    """The time until ``until`` by the database's clock, which also set it; zero if it is None."""
    return timedelta(0) if until is None else until - row.database_time


def show_badge(kind: str, label: Any) -> SafeString:
    """A coloured badge of kind ``done``, ``waiting``, ``stuck`` or ""."""
    return format_html('<span class="idempotency-state idempotency-{}">{}</span>', kind or "plain", label)


def show_with_detail(shown: Any, *details: Any) -> SafeString:
    below = ", ".join(str(detail) for detail in details if detail)
    return format_html('{} <span class="idempotency-detail">{}</span>', shown, below) if below else shown


def show_key(key: str) -> SafeString:
    """A key in a list, shortened if it is long."""
    shown = key if len(key) <= MAX_KEY else f"{key[:12]}…{key[-8:]}"
    return format_html('<span class="idempotency-key" title="{}">{}</span>', key, shown)


def show_code(text: str) -> SafeString:
    """A whole key or trace, selectable with one click."""
    return format_html('<code class="idempotency-code">{}</code>', text)


def show_time(moment: datetime) -> str:
    """A time as in logs: "2026-11-23 14:26:30"."""
    return date_format(moment if is_naive(moment) else localtime(moment), "Y-m-d H:i:s")


def format_time_left(left: timedelta) -> str:
    """ "5 min left", or "over for 3 s"."""
    if left > timedelta(0):
        return gettext("%(duration)s left") % {"duration": format_duration(left)}
    return gettext("over for %(duration)s") % {"duration": format_duration(-left)}


def format_duration(duration: timedelta) -> str:
    """A duration in its two largest units: "2 d 3 h", "1 min 5 s"."""
    seconds = max(0, round(duration.total_seconds()))
    parts: list[tuple[int, str]] = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        if count or parts:
            parts.append((count, unit))
    return " ".join(f"{count} {unit}" for count, unit in parts[:2] if count) or "0 s"


def show_text(text: str | None) -> str | SafeString:
    if not text:
        return NONE
    if len(text) > MAX_SHOWN:
        cut = {"beginning": text[:MAX_SHOWN], "count": len(text) - MAX_SHOWN}
        text = gettext("%(beginning)s… (%(count)d more characters)") % cut
    return format_html('<pre class="idempotency-text">{}</pre>', text)
