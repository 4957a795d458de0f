"""``manage.py idempotency_stats``: the statistics as a table or as JSON, and conditions under which it fails."""

from __future__ import annotations

import operator
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from json import dumps
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from ...operate.statistics import EVENTS, Number, Precision, by_operation, stats
from ...store import records_database
from ..running import EXIT_REFUSED, EXIT_USAGE, check_database, refusals_as_errors, require

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
    "since_purge": "last complete purge",
    "claims": "claims",
    "take_overs": "take-overs",
    "completions": "completions",
    "replays": "replays",
    "replay_rate": "  replay rate",
    "conflicts": "conflicts (409)",
    "reused_keys": "reused keys (422)",
    "releases": "releases",
    "unrecorded": "answers that are no outcome",
    "lease_losses": "lease losses",
    "recoveries": "recoveries",
    "parkings": "parkings",
}

#: The numbers that are shown for each operation.
OF_OPERATIONS = (*EVENTS, "parked", "abandoned")
WIDTH = max(len(LABELS[name].strip()) for name in OF_OPERATIONS)
UNKNOWN_OPERATION = "(settled by an operator, the operation was not known)"


OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
_COMPARISON = re.compile(r"\s*(\w+)\s*(>=|<=|==|!=|>|<)\s*(\d+(?:\.\d+)?)\s*", re.ASCII)


@dataclass(frozen=True)
class Condition:
    """A comparison of one number, such as ``parked > 0``, under which the command fails."""

    name: str
    sign: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> Condition:
        """:raises ArgumentTypeError: the text is no comparison of a number that there is."""
        comparison = _COMPARISON.fullmatch(text)
        if comparison is None:
            raise ArgumentTypeError(
                f"{text!r} is not a comparison. Write a name, one of {' '.join(OPERATORS)}, and a number, such as "
                f"'parked > 0'."
            )
        name, sign, bound = comparison.groups()
        if name not in LABELS:
            raise ArgumentTypeError(f"there is no number {name!r}. The numbers are {', '.join(LABELS)}.")
        return cls(name, sign, float(bound))

    def __str__(self) -> str:
        return f"{self.name} {self.sign} {self.bound:g}"

    def holds(self, number: Number) -> bool:
        """Whether the comparison is true, or may be true of a number that was counted up to a bound only.

        :raises CommandError: the number is not known for this database.
        """
        if number.kind is Precision.UNKNOWN:
            raise CommandError(
                f"This database can't tell {self.name}, so {str(self)!r} can't be checked.", returncode=EXIT_USAGE
            )
        if number.value is None:
            return False
        if number.kind is Precision.AT_LEAST:
            if self.sign in {">", ">=", "!="}:
                return True
            if self.sign == "==":
                return number.value <= self.bound
        return OPERATORS[self.sign](number.value, self.bound)


class Command(BaseCommand):
    help = (
        "Show the numbers of idempotency records, and the counts of events in all processes. The command never "
        "reads a huge table: each number says whether it is exact, a lower bound, an estimate, or up to ten seconds "
        "late."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
        parser.add_argument("--by-operation", action="store_true", help="show instead the events of each operation")
        parser.add_argument(
            "--fail-if",
            metavar="CONDITION",
            type=Condition.parse,
            action="append",
            default=[],
            help="exit with 1 if this is true, such as 'parked > 0'. May be given several times. With --by-operation "
            "it is checked for each operation",
        )
        parser.add_argument("--database", metavar="ALIAS", help="default: the database that records are written to")

    def handle(self, *args: object, **options: Any) -> None:
        using = records_database() if options["database"] is None else options["database"]
        check_database(using)
        conditions: list[Condition] = options["fail_if"]
        for name in [condition.name for condition in conditions] if options["by_operation"] else ():
            known = f"With --by-operation the numbers are {', '.join(OF_OPERATIONS)}."
            require(name in OF_OPERATIONS, f"{name} is not known for each operation. {known}")
        numbers: dict[str, dict[str, Number]]
        with refusals_as_errors(using, ""):
            if options["by_operation"]:
                events = by_operation(using)
                text = dumps(events) if options["json"] else _table_of_operations(events)
                numbers = {
                    f"{operation or UNKNOWN_OPERATION}: ": {
                        name: Number(count, Precision.RECENT) for name, count in counts.items()
                    }
                    for operation, counts in events.items()
                }
            else:
                read = stats(using)
                text = dumps(read.as_dict()) if options["json"] else _table_of_numbers(dict(read))
                numbers = {"": dict(read)}
        self.stdout.write(text)
        is_true = False
        for place, of_place in numbers.items():
            for condition in conditions:
                number = of_place[condition.name]
                if condition.holds(number):
                    is_true = True
                    value = f"{'at least ' if number.kind is Precision.AT_LEAST else ''}{number.value}"
                    self.stderr.write(f"{place}{condition} is true: {condition.name} is {value}.")
        if is_true:
            sys.exit(EXIT_REFUSED)


def _table_of_numbers(numbers: dict[str, Number]) -> str:
    kinds = {name: "" if number.kind is Precision.NEVER else str(number.kind) for name, number in numbers.items()}
    rows = [(label, _format(name, numbers[name]), kinds[name]) for name, label in LABELS.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{label:{widths[0]}}  {value:>{widths[1]}}  {kind}" for label, value, kind in rows)


def _table_of_operations(operations: dict[str, dict[str, int]]) -> str:
    lines = []
    for operation, events in operations.items():
        lines.append(operation or UNKNOWN_OPERATION)
        lines += [f"  {LABELS[name].strip():{WIDTH}}  {count:>12,}" for name, count in events.items() if count]
    return "\n".join(lines) or "Nothing has happened yet."


def _format(name: str, number: Number) -> str:
    if number.kind is Precision.NEVER:
        return "never"
    if number.value is None:
        return "-"
    if name == "table_bytes":
        return f"{number.value / 1e6:,.1f} MB"
    if name in {"overdue", "oldest_in_progress"}:
        return f"{number.value:,.0f} s"
    if name == "since_purge":
        return f"{number.value / 3600:,.0f} h"
    if name == "replay_rate":
        return f"{number.value:.1%}"
    return f"{number.value:,}"
