"""``history``: how a record's attempts began and ended. A first attempt that completes is not in it.

The statements that release, park, take over and start over append one entry each. A first claim and a completing update
append none, so an ordinary execution costs nothing. An entry has ``event``, ``at`` (the database's clock), ``attempt``
and ``why``: the type of the error or the status of the response, without its text, which may contain a secret. A sweep
changes many records in one statement, so its entries have only ``event`` and ``at``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from django.db.models import F, Func, JSONField, TextField, Value

from ..models import Now

#: A record keeps this many of its latest entries.
MAX_ENTRIES: Final = 20

#: SQL that appends an entry, by vendor. On PostgreSQL no STABLE function gets a column as argument, because Citus
#: refuses that.
APPENDED: Final[Mapping[str, str]] = {
    "postgresql": (
        f"(CASE WHEN jsonb_array_length({{history}}) >= {MAX_ENTRIES} THEN {{history}} - 0"
        " ELSE coalesce({history}, '[]'::jsonb) END) || ({entry}::jsonb || jsonb_build_object('at', {now}))"
    ),
    "sqlite": (
        f"json_insert(CASE WHEN json_array_length({{history}}) >= {MAX_ENTRIES} THEN json_remove({{history}}, '$[0]')"
        " ELSE coalesce({history}, '[]') END, '$[#]', json_set({entry}, '$.at', {now}))"
    ),
    "mysql": (
        f"JSON_ARRAY_APPEND(CASE WHEN JSON_LENGTH({{history}}) >= {MAX_ENTRIES} THEN JSON_REMOVE({{history}}, '$[0]')"
        " ELSE COALESCE({history}, '[]') END, '$', JSON_SET({entry}, '$.at', {now}))"
    ),
}


def entry(event: str, attempt: int | None = None, error: str | None = None) -> str:
    """An entry as JSON, without its time, which the database adds."""
    known = {"event": event, "attempt": attempt, "why": error and error.partition(": ")[0][:100]}
    return json.dumps({name: value for name, value in known.items() if value is not None})


class Appended(Func):
    """The history with one more entry."""

    def __init__(self, *known: Any) -> None:
        super().__init__(
            F("history"), Value(entry(*known), output_field=TextField()), Now(), output_field=JSONField(null=True)
        )

    def as_sql(self, compiler: Any, connection: Any, **context: Any) -> tuple[str, Any]:  # type: ignore[override]
        (history, _), (added, parameters), (now, _) = map(compiler.compile, self.get_source_expressions())
        if connection.vendor not in APPENDED:
            return history, []  # an unknown database keeps no history
        return APPENDED[connection.vendor].format(history=history, entry=added, now=now), parameters
