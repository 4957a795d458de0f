"""Counters with Django's ORM."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from django.db.models import F

from ...models import IdempotencyCounter
from ..store import Store


class Counters(Store):
    def add_counts(self, counts: Mapping[tuple[str, str], int], hour: int) -> None:
        # The database's settings decide how long to wait for a lock.
        counters = IdempotencyCounter.objects.using(self.using)
        # In one order, so that no two processes can deadlock.
        for place, ((operation, event), count) in product((0, hour), sorted(counts.items())):
            one = {"hour": place, "operation": operation, "event": event}
            counter = counters.filter(**one)
            if not counter.update(total=F("total") + count):
                # Two processes may get here at the same time. One of them creates the counter, and both add to it.
                counters.bulk_create([IdempotencyCounter(**one)], ignore_conflicts=True)
                counter.update(total=F("total") + count)
