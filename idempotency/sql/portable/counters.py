"""The ORM adds to counters."""

from __future__ import annotations

from collections.abc import Mapping

from django.db.models import F

from ...models import IdempotencyCounter
from ..store import Store


class Counters(Store):
    def add_counts(self, counts: Mapping[tuple[str, str], int]) -> None:
        # How long a lock is waited for, the database's settings say.
        counters = IdempotencyCounter.objects.using(self.using)
        for (operation, event), count in sorted(counts.items()):  # so that no two processes can wait for each other
            counter = counters.filter(operation=operation, event=event)
            if not counter.update(total=F("total") + count):
                # Two processes may get here at the same time. One of them makes the counter, then both add to it.
                counters.bulk_create([IdempotencyCounter(operation=operation, event=event)], ignore_conflicts=True)
                counter.update(total=F("total") + count)
