"""``manage.py idempotency_sizing``: what a load will need of the database, on paper."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import fields
from math import isfinite
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from ..sizing import DAY, Load, Size

_OPTIONS = {
    "retries": "the part of the operations that is retried once",
    "body": "bytes of a recorded body",
    "retention": "days, as TTL says",
    "peak": "the busiest second, in times of the mean",
    "handler": "seconds for which a handler keeps its connection",
    "checkpoint": "seconds between two checkpoints (checkpoint_timeout)",
    "purge_rate": "rows a second that one purge deletes",
}


class Command(BaseCommand):
    help = (
        "Estimate what a number of operations a day needs of PostgreSQL: rows, bytes, log, writes, connections, and "
        "the time of the purge. Nothing is read from the database. The estimate is for the records alone, without "
        "what the handlers write."
    )
    requires_system_checks: list[str] = []  # noqa: RUF012 - Django's own type

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("operations_per_day", nargs="+", type=_positive, metavar="OPERATIONS", help="such as 1e6")
        defaults = {field.name: field.default for field in fields(Load)}
        for name, text in _OPTIONS.items():
            option = f"--{name.replace('_', '-')}"
            parser.add_argument(
                option, type=_positive, default=defaults[name], metavar="N", help=f"{text}; %(default)s by default"
            )

    def handle(self, *args: object, operations_per_day: list[float], **options: Any) -> None:
        chosen = {name: options[name] for name in _OPTIONS}
        sizes = [Size(Load(operations_per_day=operations, **chosen)) for operations in operations_per_day]
        rows = [(label, *(render(size) for size in sizes)) for label, render in _LINES.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for label, *cells in rows:
            numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
            self.stdout.write("  ".join((label.ljust(widths[0]), *numbers)))


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (isfinite(number) and number > 0):
        raise ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def _scaled(number: float, units: tuple[str, ...] = ("", " thousand", " million", " billion", " trillion")) -> str:
    """Three digits and a unit."""
    place = 0
    while number >= 999.5 and place < len(units) - 1:
        number, place = number / 1000, place + 1
    digits = 0 if number >= 99.5 else 1
    return f"{number:,.{digits}f}{units[place]}"


def _bytes(number: float) -> str:
    return _scaled(number, (" B", " kB", " MB", " GB", " TB", " PB"))


def _duration(seconds: float) -> str:
    for size, unit in ((DAY, "days"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


_LINES: dict[str, Callable[[Size], str]] = {
    "operations a day": lambda size: _scaled(size.load.operations_per_day),
    "operations a second, mean": lambda size: _scaled(size.operations),
    "operations a second, peak": lambda size: _scaled(size.peak_operations),
    "records": lambda size: _scaled(size.rows),
    "table": lambda size: _bytes(size.table),
    "indexes": lambda size: _bytes(size.indexes),
    "  of them to keep in memory": lambda size: _bytes(size.scope_index),
    "log of an operation": lambda size: _bytes(size.log_per_operation),
    "  whole pages in it": lambda size: f"{size.whole_pages:.2f}",
    "log a day, with purge and vacuum": lambda size: _bytes(size.log_per_day),
    "log a second, peak": lambda size: _bytes(size.log_per_day / DAY * size.load.peak),
    "COMMITs a second, peak": lambda size: _scaled(size.flushes),
    "page writes a second, peak": lambda size: _scaled(size.page_writes),
    "round trips a second, peak": lambda size: _scaled(size.statements),
    "busy connections, peak": lambda size: _scaled(size.connections),
    "rows to purge a second, mean": lambda size: _scaled(size.operations),
    "one purge is at work, a day": lambda size: _duration(size.purge_time),
}
