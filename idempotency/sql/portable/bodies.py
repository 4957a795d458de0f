"""The purge of bodies with Django's ORM: a SELECT, and then UPDATEs of as many rows as a statement may name."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db.models import DateTimeField, ExpressionWrapper, F, Value
from django.db.models.functions import Now

from ...models import IdempotencyRecord, IdempotencyStep, RecordQuerySet
from ...outcome import BODY_GONE
from ..store import DeletedBatch, Part, Store


class Bodies(Store):
    def delete_bodies(self, part: Part, limit: int, after: datetime | None) -> DeletedBatch:
        records = RecordQuerySet(IdempotencyRecord, using=self.using)
        due = records.with_body_past_retention()
        if after is not None:
            due = due.filter(body_expires_at__gte=after)
        # No lock is taken in the index, because on MySQL a lock in it may also keep claims from inserting.
        found = list(due.order_by("body_expires_at", "id").values_list("id", "body_expires_at")[:limit])
        ids = [pk for pk, _ in found]
        # A statement takes a bounded number of parameters. On SQLite that number is low.
        step = max(1, self.connection.ops.bulk_batch_size([IdempotencyRecord._meta.pk], ids))
        deleted = 0
        for start in range(0, len(ids), step):
            free = self.lock_free(records.filter(pk__in=ids[start : start + step]).values_list("pk", flat=True))
            # The UPDATE repeats the conditions, because a record may have been claimed since the SELECT. As an
            # expression, the time keeps the planner from its index.
            ends = ExpressionWrapper(F("body_expires_at") + Value(timedelta(0)), output_field=DateTimeField())
            due_now = records.completed().alias(ends=ends).filter(pk__in=free, ends__lte=Now())
            IdempotencyStep.objects.using(self.using).filter(record_id__in=due_now.values("pk")).delete()
            deleted += due_now.update(response_body=BODY_GONE, response_headers=[], error=None, body_expires_at=None)
        # If others have locked some of the rows, the batch counts as the last one, because the next one would find them
        # again. The next run takes what is left.
        return DeletedBatch(deleted, deleted < limit, found[-1][1] if found else None)
