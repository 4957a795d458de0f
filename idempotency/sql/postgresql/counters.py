"""PostgreSQL: one statement adds what a process has counted."""

from __future__ import annotations

from collections.abc import Mapping

from ..store import Store
from .claims import BOUND_WAITING, WITHOUT_DISK

# Another process adds to the same rows in milliseconds, so a wait is bounded. A server that crashes forgets what it had
# not yet written, which statistics can bear, so COMMIT needn't wait for the disk. All processes lock the rows in one
# order, so that no two of them can wait for each other.
_ADD = f"""
INSERT INTO idempotency_counter AS counter (operation, event, total)
SELECT operation, event, total
FROM (SELECT {BOUND_WAITING} || {WITHOUT_DISK} AS made) AS settings,
    unnest(%s::text[], %s::text[], %s::bigint[]) AS counted (operation, event, total)
WHERE made <> ''
ORDER BY operation COLLATE "C", event COLLATE "C"
ON CONFLICT (operation, event) DO UPDATE SET total = counter.total + excluded.total
"""


class Counters(Store):
    def add_counts(self, counts: Mapping[tuple[str, str], int]) -> None:
        operations, events = [operation for operation, _ in counts], [event for _, event in counts]
        with self.connection.cursor() as cursor:
            cursor.execute(_ADD, [operations, events, list(counts.values())])
