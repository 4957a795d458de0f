"""Adds counts to the table: one statement on PostgreSQL, the ORM's on other databases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import product
from typing import Final

from django.db import connections
from django.db.models import F

from ...operate.batches import in_transaction
from .models import IdempotencyCounter

#: Another process that adds to the same rows is done in milliseconds.
STATEMENT_TIMEOUT: Final = timedelta(seconds=5)

# All processes lock the rows in the same order, so that no two of them can deadlock.
_ADD = """
INSERT INTO idempotency_dashboard_counter AS counter (hour, operation, event, total)
SELECT hour, operation, event, total
FROM unnest(ARRAY[0, %s::integer]) AS hour,
    unnest(%s::text[], %s::text[], %s::bigint[]) AS counted (operation, event, total)
ORDER BY hour, operation COLLATE "C", event COLLATE "C"
ON CONFLICT (hour, operation, event) DO UPDATE SET total = counter.total + excluded.total
"""


def write_counts(using: str, counts: Mapping[tuple[str, str], int], hour: int) -> None:
    """Add to the counters of each (operation, event): those of the hour, and the sums, which have the hour 0.

    The COMMIT need not wait for the disk: statistics may lose their last counts in a crash of the server.

    :raises DatabaseError: the database refuses: under REPEATABLE READ because another process flushes, under InnoDB
        because another process inserts a new counter.
    :raises RuntimeError: a transaction is open.
    """
    add = _ADDS.get(connections[using].vendor, _add)
    in_transaction(using, lambda _: add(using, counts, hour), statement_timeout=STATEMENT_TIMEOUT, wait_for_disk=False)


def _add_at_once(using: str, counts: Mapping[tuple[str, str], int], hour: int) -> None:
    operations, events = [operation for operation, _ in counts], [event for _, event in counts]
    with connections[using].cursor() as cursor:
        cursor.execute(_ADD, [hour, operations, events, list(counts.values())])


def _add(using: str, counts: Mapping[tuple[str, str], int], hour: int) -> None:
    counters = IdempotencyCounter.objects.using(using)
    # In one order, so that no two processes can deadlock.
    for place, ((operation, event), count) in product((0, hour), sorted(counts.items())):
        one = {"hour": place, "operation": operation, "event": event}
        counter = counters.filter(**one)
        if not counter.update(total=F("total") + count):
            # Two processes may get here at the same time. One of them creates the counter, and both add to it.
            counters.bulk_create([IdempotencyCounter(**one)], ignore_conflicts=True)
            counter.update(total=F("total") + count)


_ADDS: Final[Mapping[str, Callable[[str, Mapping[tuple[str, str], int], int], None]]] = {"postgresql": _add_at_once}
