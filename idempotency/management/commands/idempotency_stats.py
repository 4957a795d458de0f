"""``manage.py idempotency_stats``: the statistics as a table or as JSON."""

from __future__ import annotations

from json import dumps
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from ...protocol.transactions import alias
from ...upkeep.stats import EVENTS, Number, stats
from ...upkeep.stats import by_operation as stats_by_operation
from ..running import check_database, refusals_as_errors

LABELS = {
    "table_bytes": "table and indexes",
    "records": "records",
    "in_progress": "  in progress",
    "recoverable": "  recoverable",
    "completed": "  completed",
    "parked": "  parked",
    "abandoned": "abandoned claims",
    "overdue": "  longest overdue",
    "oldest_in_progress": "oldest in progress",
    "most_attempts": "most attempts of one in progress",
    "claims": "claims",
    "take_overs": "take-overs",
    "completions": "completions",
    "replays": "replays",
    "replay_rate": "  replay rate",
    "conflicts": "conflicts (409)",
    "reused_keys": "reused keys (422)",
    "releases": "releases",
    "lease_losses": "lease losses",
    "recoveries": "recoveries",
    "parkings": "parkings",
}

WIDTH = max(len(LABELS[name]) for name in EVENTS)
UNKNOWN_OPERATION = "(settled by an operator, the operation was not known)"


class Command(BaseCommand):
    help = (
        "Show what the table of idempotency records holds, and what has happened in all processes. The command never "
        "reads a huge table: each number says whether it is exact, a lower bound, an estimate, or up to ten seconds "
        "late."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
        parser.add_argument(
            "--by-operation", action="store_true", help="show instead what has happened to each operation's records"
        )
        parser.add_argument("--database", metavar="ALIAS", help="default: the database that records are written to")

    def handle(self, *args: object, json: bool, by_operation: bool, database: str | None, **options: Any) -> None:
        using = alias() if database is None else database
        check_database(using)
        with refusals_as_errors(using):
            if by_operation:
                events = stats_by_operation(using)
                text = dumps(events) if json else _table_of_operations(events)
            else:
                numbers = stats(using)
                text = dumps(numbers.as_dict()) if json else _table_of_numbers(dict(numbers))
        self.stdout.write(text)


def _table_of_numbers(numbers: dict[str, Number]) -> str:
    rows = [(label, _format(name, numbers[name]), str(numbers[name].kind)) for name, label in LABELS.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{label:{widths[0]}}  {value:>{widths[1]}}  {kind}" for label, value, kind in rows)


def _table_of_operations(operations: dict[str, dict[str, int]]) -> str:
    lines = []
    for operation, events in operations.items():
        lines.append(operation or UNKNOWN_OPERATION)
        lines += [f"  {LABELS[name]:{WIDTH}}  {count:>12,}" for name, count in events.items() if count]
    return "\n".join(lines) or "Nothing has happened yet."


def _format(name: str, number: Number) -> str:
    if number.value is None:
        return "-"
    if name == "table_bytes":
        return f"{number.value / 1e6:,.1f} MB"
    if name in {"overdue", "oldest_in_progress"}:
        return f"{number.value:,.0f} s"
    if name == "replay_rate":
        return f"{number.value:.1%}"
    return f"{number.value:,}"
