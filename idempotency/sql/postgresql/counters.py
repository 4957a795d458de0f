"""Counters on PostgreSQL: one statement adds the counts of a process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .citus import Citus
from .claims import BOUND_WAITING, NO_DISK, WAITING, WITHOUT_DISK

# The wait for a lock is bounded, because another process adds to the same rows in milliseconds. COMMIT need not wait
# for the disk: if the server crashes, it may lose the last counts, which is acceptable for statistics. All processes
# lock the rows in the same order, so that no two of them can deadlock.
_ADD = f"""
INSERT INTO idempotency_counter AS counter (hour, operation, event, total)
SELECT hour, operation, event, total
FROM (SELECT {BOUND_WAITING} || {WITHOUT_DISK} AS made) AS settings,
    unnest(ARRAY[0, %s::integer]) AS hour,
    unnest(%s::text[], %s::text[], %s::bigint[]) AS counted (operation, event, total)
WHERE made <> ''
ORDER BY hour, operation COLLATE "C", event COLLATE "C"
ON CONFLICT (hour, operation, event) DO UPDATE SET total = counter.total + excluded.total
"""


class Counters(Citus):
    def add_counts(self, counts: Mapping[tuple[str, str], int], hour: int) -> None:
        operations, events = [operation for operation, _ in counts], [event for _, event in counts]
        parameters: list[Any] = [hour, operations, events, list(counts.values())]
        with self.connection.cursor() as cursor:
            if self.has_citus:
                self.execute_on_citus(cursor, _ADD, parameters, WAITING, NO_DISK)  # each server has a copy of the rows
            else:
                cursor.execute(_ADD, parameters)
