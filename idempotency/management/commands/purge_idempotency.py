"""``manage.py purge_idempotency``: purge in batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandParser

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
        yield self._work("record", batches)
        for other in other_purges():
            if other.due(self.using).exists():
                yield self._work(other.row, other.batches(batch_size=self.batch_size, using=self.using))

    def _work(self, name: str, batches: Iterator[PurgeResult]) -> Work[PurgeResult]:
        return Work(batches, lambda result: self._describe("Purged", result.deleted, name))

    def _describe(self, verb: str, count: int, name: str) -> str:
        return f"{verb} {counted(count, name)} from database {self.using!r}."

    def count(self) -> None:
        going = due(include_parked=self.include_parked, using=self.using).count()
        self.write(self._describe("Would purge", going, "record"))
        past = IdempotencyRecord.objects.using(self.using).filter(expires_at__lte=Now())
        kept = {"in progress": past.in_progress()}
        if not self.include_parked:
            kept["parked"] = past.parked()
        for state, records in kept.items():
            if count := records.count():
                self.write(f"Would keep {counted(count, 'record')} past retention: {state}.")
        for other in other_purges():
            if count := other.due(self.using).count():
                self.write(self._describe("Would purge", count, other.row))
