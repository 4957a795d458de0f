"""``manage.py purge_idempotency``: purge in batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandParser
from django.db.models import Count, QuerySet

from ...lifecycle import Status
from ...models import IdempotencyRecord, Now
from ...operate.purge import DEFAULT_BATCH_SIZE, MAX_BATCH_SIZE, PurgeResult, due, other_purges, purge_batches
from ..running import EXIT_CODES, BatchCommand, Work, counted


class Command(BatchCommand[PurgeResult]):
    help = (
        "Delete idempotency records past their retention, recorded responses past their shorter retention, and, with "
        "idempotency.outbox, messages sent longer ago than RETENTION plus a day. Oldest first. Claims and unsent "
        f"messages are never deleted, parked records only with --include-parked. Runs may overlap. {EXIT_CODES}."
    )
    batch_of = "rows to delete in one transaction"
    default_batch = DEFAULT_BATCH_SIZE
    largest_batch = MAX_BATCH_SIZE

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--include-parked", action="store_true", help="also delete parked records past retention")

    def handle(self, *args: object, **options: Any) -> None:
        self.include_parked: bool = options["include_parked"]
        super().handle(*args, **options)

    def works(self) -> Iterator[Work[PurgeResult]]:
        batches = purge_batches(batch_size=self.batch_size, include_parked=self.include_parked, using=self.using)
        yield self._work("record", batches, due(include_parked=self.include_parked, using=self.using))
        for other in other_purges():
            if (rows := other.due(self.using)).exists():
                yield self._work(other.row, other.batches(batch_size=self.batch_size, using=self.using), rows)

    def _work(self, name: str, batches: Iterator[PurgeResult], rows: QuerySet[Any]) -> Work[PurgeResult]:
        return Work(batches, rows, lambda result: self._describe("Purged", result.deleted, name))

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
