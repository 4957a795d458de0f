"""Presentation shared by the admin pages: badges, durations, long texts, bounded lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ORDER_VAR, ChangeList
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timezone import is_naive, localtime
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..options.validators import MAX_NAME_LENGTH

if TYPE_CHECKING:
    AnyModelAdmin = admin.ModelAdmin[Any]
    AnyPaginator = Paginator[Any]
else:
    AnyModelAdmin = admin.ModelAdmin
    AnyPaginator = Paginator

#: A list ends here, after a hundred pages. Later rows can be found by a search or a filter.
MAX_LISTED = 10_000

#: A longer body or payload is truncated.
MAX_SHOWN = 20_000  # characters

#: A list shortens longer keys.
MAX_KEY = 24  # characters

NONE = "–"


class BoundedPaginator(AnyPaginator):
    """Stops counting at ``MAX_LISTED``, because an exact count reads the whole table."""

    @cached_property
    def count(self) -> int:
        return cast("QuerySet[Any]", self.object_list).order_by()[:MAX_LISTED].count()


class IndexedList(ChangeList):
    """A list whose URL allows only queries that an index can answer."""

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        values = [value for values in self.get_filters_params().values() for value in values]
        # PostgreSQL rejects NUL, and Citus rejects an account that is longer than its column.
        if any("\x00" in value or len(value) > MAX_NAME_LENGTH for value in values):
            raise IncorrectLookupParameters
        return super().get_queryset(request, exclude_parameters)

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        # Django applies sortable_by to the links only. A URL could still sort by a column without an index.
        columns = {str(place) for place, name in enumerate(self.list_display) if name in (self.sortable_by or ())}
        requested = self.params.pop(ORDER_VAR, "").split(".")
        if sortable := [place for place in requested if place.removeprefix("-") in columns]:
            self.params[ORDER_VAR] = ".".join(sortable)
        return super().get_ordering(request, queryset)


class ReadOnlyAdmin(AnyModelAdmin):
    """The admin of a possibly huge table whose rows can't be edited."""

    list_per_page = 100
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # each facet counts the whole table
    paginator = BoundedPaginator

    class Media:
        css: Final = {"all": ["idempotency/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return IndexedList


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
