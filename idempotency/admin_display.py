"""How the admin shows what it shows, whichever table it is of: durations, long texts, as many rows as are bearable."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.utils.html import format_html
from django.utils.safestring import SafeString

if TYPE_CHECKING:
    AnyPaginator = Paginator[Any]
else:
    AnyPaginator = Paginator

#: Counting stops here, and so do the pages. Nobody turns a hundred of them; a search or a filter finds the row.
MAX_LISTED = 10_000

#: Of a recorded body or a payload, as much is shown as a person reads.
MAX_SHOWN = 20_000  # characters

NONE = "–"


class BoundedPaginator(AnyPaginator):
    """Counts no further than ``MAX_LISTED``: an exact count of a filtered table reads all of it."""

    @cached_property
    def count(self) -> int:
        return cast("QuerySet[Any]", self.object_list).order_by()[:MAX_LISTED].count()


def time_left(row: Any, until: datetime | None) -> timedelta:
    """From now until then, by the clock of the database, which set it. An unset time is over."""
    return timedelta(0) if until is None else until - row.database_time


def written(duration: timedelta) -> str:
    """A duration in its two largest units: "2 d 3 h", "1 min 5 s"."""
    seconds = max(0, round(duration.total_seconds()))
    parts: list[tuple[int, str]] = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        if count or parts:
            parts.append((count, unit))
    return " ".join(f"{count} {unit}" for count, unit in parts[:2] if count) or "0 s"


def preformatted(text: str | None) -> str | SafeString:
    if not text:
        return NONE
    left_out = len(text) - MAX_SHOWN
    shown = text if left_out <= 0 else f"{text[:MAX_SHOWN]}… ({left_out} more characters)"
    return format_html('<pre style="margin: 0; white-space: pre-wrap">{}</pre>', shown)
