"""``manage.py idempotency_stats``: print the statistics as a table or JSON."""

from __future__ import annotations

from json import dumps
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from ...operate.statistics import Number, Precision, stats
from ...store import records_database
from ..running import check_database, refusals_as_errors

UNITS = {"table_bytes": "B", "overdue": "s", "oldest_in_progress": "s", "since_purge": "s"}


class Command(BaseCommand):
    help = (
        "Print statistics of idempotency records, and counts of events in all processes. Never reads a whole table: "
        "each number is marked as exact, a lower bound, an estimate, or up to ten seconds late."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
        parser.add_argument("--database", metavar="ALIAS", help="default: the database of records")

    def handle(self, *args: object, **options: Any) -> None:
        using = records_database() if options["database"] is None else options["database"]
        check_database(using)
        with refusals_as_errors(using, ""):
            read = stats(using)
        self.stdout.write(dumps(read.as_dict()) if options["json"] else _table_of_numbers(dict(read)))


def _table_of_numbers(numbers: dict[str, Number]) -> str:
    rows = [(name.replace("_", " "), _format(name, number), str(number.kind)) for name, number in numbers.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{label:{widths[0]}}  {value:>{widths[1]}}  {kind}" for label, value, kind in rows)


def _format(name: str, number: Number) -> str:
    if number.value is None or number.kind is Precision.NEVER:
        return "-"
    return f"{number.value:,} {UNITS.get(name, '')}".rstrip()
