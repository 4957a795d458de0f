"""``manage.py purge_idempotency``: parse arguments, purge batch after batch, report."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db.models import Count, QuerySet

from ...lifecycle import Status
from ...models import IdempotencyRecord
from ...outbox.backlog import purge_sent_batches, sent_past_retention
from ...protocol.claims import alias
from ...upkeep.retention import DEFAULT_BATCH_SIZE, MAX_BATCH_SIZE, PurgeResult, due, purge_batches
from ..progress import REPORT_EVERY, progress
from ..running import (
    EXIT_REFUSED,
    EXIT_SIGNAL,
    EXIT_USAGE,
    EXIT_WORK_LEFT,
    MAX_PAUSE,
    BatchCommand,
    add_batch_size,
    check_batches,
    check_database,
    refusals_as_errors,
    stop_between_batches,
)

EPILOG = f"""exit codes:
  0    everything that was due is purged
  {EXIT_REFUSED}    the database refused; what earlier batches deleted stays deleted
  {EXIT_USAGE}    an argument is wrong, nothing was done
  {EXIT_WORK_LEFT}    stopped by --max-batches, and more is due
  {EXIT_SIGNAL + signal.SIGINT}  interrupted, {EXIT_SIGNAL + signal.SIGTERM} terminated: after the batch in hand
"""


@dataclass
class _Kind:
    """What is purged: its name in the singular, its batches, all that is due, and whether the batches are at an end."""

    name: str
    batches: Iterator[PurgeResult]
    due: QuerySet[Any]
    finished: bool = False


class Command(BatchCommand):
    help = (
        "Delete idempotency records past their retention, and messages that were sent longer ago than TTL and a day, "
        "oldest first, in bounded batches.\n"
        "Claims are never deleted, nor are messages that were not sent; parked records only with "
        "--include-parked.\n"
        "May run at any time, and more than once at a time."
    )
    epilog = EPILOG

    def add_arguments(self, parser: CommandParser) -> None:
        add_batch_size(parser, "rows to delete in one transaction", DEFAULT_BATCH_SIZE, MAX_BATCH_SIZE)
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
        parser.add_argument("--include-parked", action="store_true", help="delete parked records past retention too")
        parser.add_argument("--database", metavar="ALIAS", help="default: the database that records are written to")

    def handle(
        self,
        *args: object,
        batch_size: int,
        max_batches: int | None,
        pause: float,
        dry_run: bool,
        include_parked: bool,
        database: str | None,
        **options: Any,
    ) -> None:
        check_batches(batch_size, max_batches, largest=MAX_BATCH_SIZE)
        if not 0 <= pause <= MAX_PAUSE:
            raise CommandError(f"--pause must be between 0 and {MAX_PAUSE:.0f} seconds.", returncode=EXIT_USAGE)
        using = alias() if database is None else database
        check_database(using)
        with refusals_as_errors(using, "What earlier batches deleted stays deleted."):
            if dry_run:
                self._count(using, include_parked)
            else:
                self._purge(using, batch_size, max_batches, pause, include_parked, options)

    def _count(self, using: str, include_parked: bool) -> None:
        past_retention = IdempotencyRecord.objects.using(using).past_retention()
        counted = dict(past_retention.order_by().values_list("status").annotate(count=Count("pk")))
        kept = [Status.IN_PROGRESS] if include_parked else [Status.IN_PROGRESS, Status.PARKED]
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
        include_parked: bool,
        options: dict[str, Any],
    ) -> None:
        kinds = [
            _Kind(
                "record",
                purge_batches(batch_size=batch_size, include_parked=include_parked, using=using),
                due(include_parked=include_parked, using=using),
            ),
            _Kind("sent message", purge_sent_batches(batch_size=batch_size, using=using), sent_past_retention(using)),
        ]
        with stop_between_batches() as stop:
            for kind in kinds:
                if kind is not kinds[0] and not kind.due.exists():
                    kind.finished = True
                    continue
                deleted = batches = 0
                reporting = progress(
                    f"Purging {kind.name}s", kind.due.count, self.write, options, every=REPORT_EVERY, leaves_bar=True
                )
                with reporting as report:
                    while stop.signum is None and batches != max_batches and not kind.finished:
                        batch = next(kind.batches)
                        deleted += batch.deleted
                        batches += 1
                        kind.finished = batch.exhausted
                        report(deleted, f"Purged {_counted(deleted, kind.name)} so far.")
                        if not kind.finished and batches != max_batches:
                            stop.sleep(pause)
                if options["verbosity"]:
                    self.stdout.write(f"Purged {_counted(deleted, kind.name)} from database {using!r}.")
        if all(kind.finished or not kind.due.exists() for kind in kinds):
            return
        self.end_with_work_left(stop, max_batches, "More is due.", verbosity=options["verbosity"])


def _counted(count: int, name: str) -> str:
    return f"1 {name}" if count == 1 else f"{count:,} {name}s"
