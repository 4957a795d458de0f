"""The purge with Django's ORM: a SELECT, and then DELETEs of as many rows as a statement may name."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from ...lifecycle import Status
from ...models import IdempotencyRecord, IdempotencyStep, RecordQuerySet
from ..store import DeletedBatch, DueRange, Store


class Purge(Store):
    def delete_due(self, due: DueRange, statuses: Collection[Status], limit: int) -> DeletedBatch:
        records = self._due(statuses, due.start).order_by("expires_at", "id")
        found = self.lock_free(records.values_list("id", "expires_at"), limit)
        ids = [pk for pk, _ in found]
        # A statement takes a bounded number of parameters. On SQLite that number is low.
        step = max(1, self.connection.ops.bulk_batch_size([IdempotencyRecord._meta.pk], ids))
        deleted = 0
        steps = IdempotencyStep.objects.using(self.using)
        for start in range(0, len(ids), step):
            # The DELETE repeats the conditions, because without locks a record may have been claimed since the SELECT.
            due_now = self._due(statuses, due.start).filter(pk__in=ids[start : start + step])
            steps.filter(record_id__in=due_now.values("pk")).delete()
            deleted += due_now.delete()[0]
        return DeletedBatch(deleted, len(found) < limit, found[-1][1] if found else None)

    def _due(self, statuses: Collection[Status], after: datetime | None) -> RecordQuerySet:
        due = RecordQuerySet(IdempotencyRecord, using=self.using).past_retention().filter(status__in=statuses)
        return due if after is None else due.filter(expires_at__gte=after)
