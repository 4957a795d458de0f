"""``manage.py purge_idempotency``: purge batch after batch, and report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from django.core.management.base import CommandParser
from django.db.models import Count, QuerySet
from django.db.models.functions import Now

from ...lifecycle import Status
from ...models import IdempotencyRecord
from ...operate.purge import DEFAULT_BATCH_SIZE, MAX_BATCH_SIZE, PurgeResult, due, other_purges, purge_batches
from ..running import MAX_PAUSE, BatchCommand, Work, counted, describe_exit_codes, require


class Command(BatchCommand[PurgeResult]):
    help = (
        "Delete idempotency records past their retention, recorded responses past their own, shorter one, and, "
        "with idempotency.outbox, messages that were sent longer ago than RETENTION and a day. The oldest go first, in "
        "bounded batches.\n"
        "Claims and unsent messages are never deleted, and parked records only with --include-parked.\n"
        "The command may run at any time, and several runs may overlap."
    )
    epilog: ClassVar[str] = describe_exit_codes({0: "everything that was due is purged"})
    batch_of = "rows to delete in one transaction"
    default_batch = DEFAULT_BATCH_SIZE
    largest_batch = MAX_BATCH_SIZE

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--pause", type=float, default=0.0, metavar="S", help="seconds to wait between batches (default: 0)"
        )
        parser.add_argument("--include-parked", action="store_true", help="delete parked records past retention too")

    def handle(self, *args: object, **options: Any) -> None:
        self.pause: float = options["pause"]
        self.include_parked: bool = options["include_parked"]
        require(0 <= self.pause <= MAX_PAUSE, f"--pause must be between 0 and {MAX_PAUSE:.0f} seconds.")
        super().handle(*args, **options)

    def works(self) -> Iterator[Work[PurgeResult]]:
        batches = purge_batches(batch_size=self.batch_size, include_parked=self.include_parked, using=self.using)
        yield self._work("record", batches, due(include_parked=self.include_parked, using=self.using))
        for other in other_purges():
            if (rows := other.due(self.using)).exists():
                yield self._work(other.row, other.batches(batch_size=self.batch_size, using=self.using), rows)

    def _work(self, name: str, batches: Iterator[PurgeResult], rows: QuerySet[Any]) -> Work[PurgeResult]:
        return Work(f"Purging {name}s", batches, rows, lambda result: self._describe("Purged", result.deleted, name))

    def _describe(self, verb: str, count: int, name: str) -> str:
        return f"{verb} {counted(count, name)} from database {self.using!r}."

    def count(self) -> None:
        records = IdempotencyRecord.objects.using(self.using)
        past = dict(records.past_retention().order_by().values_list("status").annotate(count=Count("pk")))
        past[Status.IN_PROGRESS] = records.in_progress().filter(expires_at__lte=Now()).count()
        kept = [Status.IN_PROGRESS] if self.include_parked else [Status.IN_PROGRESS, Status.PARKED]
        going = sum(past.get(status, 0) for status in Status if status not in kept)
        self.write(self._describe("Would purge", going, "record"))
        for status in kept:
            if past.get(status):
                kind = counted(past[status], "record")
                self.write(f"Would keep {kind} past retention: {status.replace('_', ' ')}.")
        for other in other_purges():
            if count := other.due(self.using).count():
                self.write(self._describe("Would purge", count, other.row))
