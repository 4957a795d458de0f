"""``manage.py idempotency_stats``: the numbers of ``stats()``, for a person or as JSON."""

from __future__ import annotations

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, connections

from idempotency.claims import alias
from idempotency.stats import Kind, Number, stats

EXIT_REFUSED = 1
EXIT_USAGE = 2

LABELS = {
    "table_bytes": "table and indexes",
    "records": "records",
    "in_progress": "  in progress",
    "recoverable": "  recoverable",
    "completed": "  completed",
    "parked": "  parked (failed)",
    "abandoned": "abandoned claims",
    "overdue": "  longest overdue",
    "oldest_in_progress": "oldest in progress",
    "most_attempts": "most attempts of one in progress",
}


class Command(BaseCommand):
    help = (
        "Show what the table of idempotency records holds. Never reads a huge table: each number says whether it is "
        "exact, a lower bound or an estimate."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
        parser.add_argument("--database", metavar="ALIAS", help="default: the database that records are written to")

    def handle(self, *args: object, json: bool, database: str | None, **options: Any) -> None:
        using = alias() if database is None else database
        if using not in connections:
            raise CommandError(f"--database: there is no database {using!r} in DATABASES.", returncode=EXIT_USAGE)
        try:
            # The counters of this process have seen nothing: it has only just started.
            numbers = {name: number for name, number in stats(using) if number.kind is not Kind.THIS_PROCESS}
        except DatabaseError as error:
            raise CommandError(f"Database {using!r} refused: {str(error).strip()}", returncode=EXIT_REFUSED) from error
        self.stdout.write(_as_json(numbers) if json else _as_table(numbers))


def _as_json(numbers: dict[str, Number]) -> str:
    return json.dumps({name: {"value": number.value, "kind": str(number.kind)} for name, number in numbers.items()})


def _as_table(numbers: dict[str, Number]) -> str:
    rows = [(LABELS[name], _written(name, number), str(number.kind)) for name, number in numbers.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{label:{widths[0]}}  {value:>{widths[1]}}  {kind}" for label, value, kind in rows]
    lines += ["", "Claims, replays, conflicts and the like are counted by each server process for itself:"]
    lines += ["read idempotency.stats.stats() there, or connect to the signals."]
    return "\n".join(lines)


def _written(name: str, number: Number) -> str:
    if number.value is None:
        return "-"
    if name == "table_bytes":
        return f"{number.value / 1e6:,.1f} MB"
    if name in {"overdue", "oldest_in_progress"}:
        return f"{number.value:,.0f} s"
    return f"{number.value:,}"
