"""``manage.py idempotency_stats``: print the statistics as a table or JSON."""

from __future__ import annotations

from json import dumps
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from ...operate.statistics import EVENTS, Number, Precision, purge_overdue, stats
from ...store import records_database
from ..running import check_database, count_undeclared, lines_about_undeclared, refusals_as_errors

UNITS = {"table_bytes": "B", "overdue": "s", "oldest_in_progress": "s", "purge_overdue": "s"}


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
            read = {**dict(stats(using)), **_of_commands(using)}
        if options["json"]:
            self.stdout.write(dumps({name: number.as_dict() for name, number in read.items()}))
        else:
            self.stdout.write(_table_of_numbers(read))


def _table_of_numbers(numbers: dict[str, Number]) -> str:
    rows = [(name.replace("_", " "), _format(name, number), _kind(name, number)) for name, number in numbers.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{label:{widths[0]}}  {value:>{widths[1]}}  {kind}" for label, value, kind in rows]
    return "\n".join([*lines, *lines_about_undeclared(numbers["undeclared"])])


def _of_commands(using: str) -> dict[str, Number]:
    """The numbers that are too expensive for each scrape."""
    return {"purge_overdue": Number(purge_overdue(using), Precision.EXACT), "undeclared": count_undeclared(using)}


def _kind(name: str, number: Number) -> str:
    if number.kind is not Precision.UNKNOWN:
        return str(number.kind)
    if name in EVENTS or name == "replay_rate":
        return "unknown: 'idempotency.contrib.dashboard' is not in INSTALLED_APPS"
    return "unknown: this database does not report it"


def _format(name: str, number: Number) -> str:
    if number.value is None:
        return "-"
    return f"{number.value:,} {UNITS.get(name, '')}".rstrip()
