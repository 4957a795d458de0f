"""``manage.py purge_idempotency``: parse arguments, purge batch after batch, report."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, connections
from django.db.models import Count, QuerySet

from idempotency.claims import alias
from idempotency.lifecycle import Status
from idempotency.management.running import (
    EXIT_REFUSED,
    EXIT_SIGNAL,
    EXIT_USAGE,
    EXIT_WORK_LEFT,
    HelpFormatter,
    stop_between_batches,
)
from idempotency.messages import purge_sent_batches, sent_past_retention
from idempotency.models import IdempotencyRecord
from idempotency.retention import DEFAULT_BATCH_SIZE, MAX_BATCH_SIZE, PurgeResult, due, purge_batches

EPILOG = f"""exit codes:
  0    everything that was due is purged
  {EXIT_REFUSED}    the database refused; what earlier batches deleted stays deleted
  {EXIT_USAGE}    an argument is wrong, nothing was done
  {EXIT_WORK_LEFT}    stopped by --max-batches, and more is due
  {EXIT_SIGNAL + signal.SIGINT}  interrupted, {EXIT_SIGNAL + signal.SIGTERM} terminated: after the batch in hand
"""

# Where nobody watches, a line now and then shows in the log that a long run is alive.
REPORT_EVERY = 10.0  # seconds

MAX_PAUSE = 3600.0  # seconds

_Report = Callable[[int], None]


@dataclass
class _Kind:
    """What is purged: its name in the singular, its batches, all that is due, and whether the batches are at an end."""

    name: str
    batches: Iterator[PurgeResult]
    due: QuerySet[Any]
    finished: bool = False


class Command(BaseCommand):
    help = (
        "Delete idempotency records past their retention, and messages that were sent as long ago, oldest first, in "
        "bounded batches.\n"
        "Claims are never deleted, nor are messages that were not sent; parked (failed) records only with "
        "--include-failed.\n"
        "May run at any time, and more than once at a time."
    )

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        kwargs = {"epilog": EPILOG, "formatter_class": HelpFormatter, **kwargs}
        return super().create_parser(prog_name, subcommand, **kwargs)

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--batch-size",
            type=int,
            default=DEFAULT_BATCH_SIZE,
            metavar="N",
            help=f"rows to delete in one transaction, up to {MAX_BATCH_SIZE} (default: %(default)s)",
        )
        parser.add_argument(
            "--max-batches",
            type=int,
            metavar="N",
            help="stop after N batches of records, and N of messages (default: no limit)",
        )
        parser.add_argument(
            "--pause", type=float, default=0.0, metavar="S", help="seconds to wait between batches (default: 0)"
        )
        parser.add_argument("--dry-run", action="store_true", help="count what is due, delete nothing")
        parser.add_argument("--include-failed", action="store_true", help="delete parked records past retention too")
        parser.add_argument("--database", metavar="ALIAS", help="default: the database that records are written to")

    def handle(
        self,
        *args: object,
        batch_size: int,
        max_batches: int | None,
        pause: float,
        dry_run: bool,
        include_failed: bool,
        database: str | None,
        **options: Any,
    ) -> None:
        # call_command() hands values over without parsing them, so they are checked here for both ways in.
        if not 1 <= batch_size <= MAX_BATCH_SIZE:
            raise CommandError(f"--batch-size must be between 1 and {MAX_BATCH_SIZE}.", returncode=EXIT_USAGE)
        if max_batches is not None and max_batches < 1:
            raise CommandError("--max-batches must be 1 or more.", returncode=EXIT_USAGE)
        if not 0 <= pause <= MAX_PAUSE:
            raise CommandError(f"--pause must be between 0 and {MAX_PAUSE:.0f} seconds.", returncode=EXIT_USAGE)
        using = alias() if database is None else database
        if using not in connections:
            raise CommandError(f"--database: there is no database {using!r} in DATABASES.", returncode=EXIT_USAGE)
        try:
            if dry_run:
                self._count(using, include_failed)
            else:
                self._purge(using, batch_size, max_batches, pause, include_failed, options)
        except DatabaseError as error:
            message = f"Database {using!r} refused: {str(error).strip()}\nWhat earlier batches deleted stays deleted."
            raise CommandError(message, returncode=EXIT_REFUSED) from error

    def _count(self, using: str, include_failed: bool) -> None:
        past_retention = IdempotencyRecord.objects.using(using).past_retention()
        counted = dict(past_retention.order_by().values_list("status").annotate(count=Count("pk")))
        kept = [Status.IN_PROGRESS] if include_failed else [Status.IN_PROGRESS, Status.FAILED]
        going = sum(count for status, count in counted.items() if status not in kept)
        self.stdout.write(f"Would purge {_counted(going, 'record')} from database {using!r}.")
        for status in kept:
            if status in counted:
                kind = _counted(counted[status], "record")
                self.stdout.write(f"Would keep {kind} past retention: {status.replace('_', ' ')}.")
        if messages := sent_past_retention(using).count():
            self.stdout.write(f"Would purge {_counted(messages, 'sent message')} from database {using!r}.")

    def _purge(
        self,
        using: str,
        batch_size: int,
        max_batches: int | None,
        pause: float,
        include_failed: bool,
        options: dict[str, Any],
    ) -> None:
        kinds = [
            _Kind(
                "record",
                purge_batches(batch_size=batch_size, include_failed=include_failed, using=using),
                due(include_failed=include_failed, using=using),
            ),
            _Kind("sent message", purge_sent_batches(batch_size=batch_size, using=using), sent_past_retention(using)),
        ]
        with stop_between_batches() as stop:
            for kind in kinds:
                if kind is not kinds[0] and not kind.due.exists():
                    kind.finished = True
                    continue
                deleted = batches = 0
                with self._reporter(kind, options) as report:
                    while stop.signum is None and batches != max_batches and not kind.finished:
                        batch = next(kind.batches)
                        deleted += batch.deleted
                        batches += 1
                        kind.finished = batch.exhausted
                        report(deleted)
                        if not kind.finished and batches != max_batches:
                            stop.sleep(pause)
                if options["verbosity"]:
                    self.stdout.write(f"Purged {_counted(deleted, kind.name)} from database {using!r}.")
        if all(kind.finished or not kind.due.exists() for kind in kinds):
            return
        if stop.signum is not None:
            name = signal.Signals(stop.signum).name
            raise CommandError(f"Stopped by {name}. More is due.", returncode=EXIT_SIGNAL + stop.signum)
        if options["verbosity"]:
            self.stdout.write(f"Stopped by --max-batches {max_batches}. More is due.")
        sys.exit(EXIT_WORK_LEFT)

    def _reporter(self, kind: _Kind, options: dict[str, Any]) -> AbstractContextManager[_Report]:
        """Progress as a bar on a terminal, if rich is installed, and as plain lines elsewhere."""
        # The bar goes where errors go, so that the output can be kept in a file while somebody watches.
        stream: TextIO = options.get("stderr") or sys.stderr
        if options["verbosity"] and stream.isatty():
            try:
                import rich  # noqa: F401
            except ImportError:
                pass
            else:
                return _bar(stream, kind)
        return self._lines(kind, options["verbosity"])

    @contextmanager
    def _lines(self, kind: _Kind, verbosity: int) -> Iterator[_Report]:
        last = time.monotonic()

        def report(deleted: int) -> None:
            nonlocal last
            if verbosity > 1 or (verbosity and time.monotonic() - last >= REPORT_EVERY):
                last = time.monotonic()
                self.stdout.write(f"Purged {_counted(deleted, kind.name)} so far.")
                self.stdout.flush()

        yield report


@contextmanager
def _bar(stream: TextIO, kind: _Kind) -> Iterator[_Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    total = kind.due.count()
    columns = (TextColumn(f"Purging {kind.name}s"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream)) as progress:
        task = progress.add_task("", total=total)
        # More can fall due during a run than were counted before it.
        yield lambda deleted: progress.update(task, completed=deleted, total=max(total, deleted))


def _counted(count: int, name: str) -> str:
    return f"1 {name}" if count == 1 else f"{count:,} {name}s"
