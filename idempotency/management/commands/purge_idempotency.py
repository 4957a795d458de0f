"""``manage.py purge_idempotency``: purge batch after batch, and report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db.models import Count, QuerySet
from django.db.models.functions import Now

from ...lifecycle import Status
from ...models import IdempotencyRecord
from ...operate.purge import (
    DEFAULT_BATCH_SIZE,
    MAX_BATCH_SIZE,
    PurgeResult,
    bodies_past_retention,
    due,
    other_purges,
    purge_batches,
    purge_body_batches,
)
from ...store import records_database
from ..running import (
    EXIT_REFUSED,
    EXIT_USAGE,
    EXIT_WORK_LEFT,
    MAX_PAUSE,
    BatchCommand,
    Stop,
    Work,
    counted,
    describe_exit_codes,
)

EPILOG = describe_exit_codes(
    {
        0: "everything that was due is purged",
        EXIT_REFUSED: "the database refused; what earlier batches deleted stays deleted",
        EXIT_WORK_LEFT: "stopped by --max-batches, and more is due",
    }
)


class Command(BatchCommand[PurgeResult]):
    help = (
        "Delete idempotency records past their retention, recorded responses past their own, shorter one, and, "
        "with idempotency.outbox, messages that were sent longer ago than TTL and a day. The oldest go first, in "
        "bounded batches.\n"
        "Claims and unsent messages are never deleted, and parked records only with --include-parked.\n"
        "The command may run at any time, and several runs may overlap."
    )
    epilog = EPILOG
    batch_of = "rows to delete in one transaction"
    default_batch = DEFAULT_BATCH_SIZE
    largest_batch = MAX_BATCH_SIZE
    max_batches_help = "stop after N batches of records, N of responses and N of messages (default: no limit)"
    dry_run_help = "count what is due, and delete nothing"
    leaves_bar = True
    refused = "What earlier batches deleted stays deleted."
    left = "More is due."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--pause", type=float, default=0.0, metavar="S", help="seconds to wait between batches (default: 0)"
        )
        parser.add_argument("--include-parked", action="store_true", help="delete parked records past retention too")

    def take_options(self, options: Mapping[str, Any]) -> None:
        self.pause, self.include_parked = options["pause"], options["include_parked"]
        if not 0 <= self.pause <= MAX_PAUSE:
            raise CommandError(f"--pause must be between 0 and {MAX_PAUSE:.0f} seconds.", returncode=EXIT_USAGE)

    def default_database(self) -> str:
        return records_database()

    def work(self) -> Work[PurgeResult]:
        batches = purge_batches(batch_size=self.batch_size, include_parked=self.include_parked, using=self.using)
        return _work("record", batches, due(include_parked=self.include_parked, using=self.using))

    def run_once(self) -> None:
        records = due(include_parked=self.include_parked, using=self.using)
        others: list[tuple[str, QuerySet[Any], Callable[..., Iterator[PurgeResult]]]] = [
            ("recorded response", bodies_past_retention(self.using), purge_body_batches),
            *((other.row, other.due(self.using), other.batches) for other in other_purges),
        ]
        with Stop() as stop:
            left: list[QuerySet[Any]] = [] if self._purge("record", self.work(), stop) else [records]
            for name, rows, purge in others:
                batches = purge(batch_size=self.batch_size, using=self.using)
                if stop.signum is not None or (
                    rows.exists() and not self._purge(name, _work(name, batches, rows), stop)
                ):
                    left.append(rows)
        # Look again, because a full last batch may have taken the last row that was due.
        if any(rows.exists() for rows in left):
            self.end_with_work_left(stop, self.max_batches, self.left, verbosity=self.verbosity)

    def describe(self, result: PurgeResult, name: str = "record") -> str:
        return f"Purged {counted(result.deleted, name)} from database {self.using!r}."

    def _purge(self, name: str, work: Work[PurgeResult], stop: Stop) -> bool:
        """Purge records, responses or messages.

        :returns: whether nothing more was due at the end, or other purges hold the rest.
        """
        result = self.take(work, stop)
        if self.verbosity:
            self.write(self.describe(result, name))
        return result.exhausted

    def count(self) -> None:
        records = IdempotencyRecord.objects.using(self.using)
        past = dict(records.past_retention().order_by().values_list("status").annotate(count=Count("pk")))
        past[Status.IN_PROGRESS] = records.in_progress().filter(expires_at__lte=Now()).count()
        kept = [Status.IN_PROGRESS] if self.include_parked else [Status.IN_PROGRESS, Status.PARKED]
        going = sum(past.get(status, 0) for status in Status if status not in kept)
        self.stdout.write(f"Would purge {counted(going, 'record')} from database {self.using!r}.")
        for status in kept:
            if past.get(status):
                kind = counted(past[status], "record")
                self.stdout.write(f"Would keep {kind} past retention: {status.replace('_', ' ')}.")
        # The response of a record that is purged goes with it.
        if bodies := bodies_past_retention(self.using).filter(expires_at__gt=Now()).count():
            self.stdout.write(f"Would purge {counted(bodies, 'recorded response')} from database {self.using!r}.")
        for other in other_purges:
            if count := other.due(self.using).count():
                self.stdout.write(f"Would purge {counted(count, other.row)} from database {self.using!r}.")


def _work(name: str, batches: Iterator[PurgeResult], due: QuerySet[Any]) -> Work[PurgeResult]:
    return Work(
        f"Purging {name}s", batches, due.count, lambda result: f"Purged {counted(result.deleted, name)} so far."
    )
