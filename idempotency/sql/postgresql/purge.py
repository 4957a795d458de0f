"""PostgreSQL: one statement purges a batch."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from ...lifecycle import Status
from ..store import DeletedBatch, Store

# Losing a batch in a crash of the server is harmless, since the next run deletes it again, and a claim that took a
# purged key's place is later in the same log: it can't survive without the deletion. So COMMIT needn't wait for disk.
_DONT_WAIT_FOR_DISK = "SET LOCAL synchronous_commit = off"

# The rows are locked in one order by all purges, so that two can't deadlock, and without waiting: a row that somebody
# has locked is being claimed anew. The select is a CTE because a subquery with a LIMIT may be run more than once by a
# join, each time for other rows. The DELETE repeats the predicate, so that whatever the select saw, nothing is deleted
# that isn't due as it is now, and joins on account_id too, which a distributed table is split by.
_DELETE_DUE = """
WITH due AS MATERIALIZED (
    SELECT id, account_id, expires_at
    FROM idempotency_record
    WHERE expires_at <= statement_timestamp() AND expires_at >= %(after)s AND status = ANY(%(statuses)s)
    ORDER BY expires_at, id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
), deleted AS (
    DELETE FROM idempotency_record AS record
    USING due
    WHERE record.account_id = due.account_id AND record.id = due.id
        AND record.expires_at <= statement_timestamp() AND record.status = ANY(%(statuses)s)
    RETURNING record.id, record.account_id
), steps AS (
    DELETE FROM idempotency_step AS step
    USING deleted
    WHERE step.account_id = deleted.account_id AND step.record_id = deleted.id
)
SELECT (SELECT count(*) FROM deleted), (SELECT count(*) FROM due), (SELECT max(expires_at) FROM due)
"""

_BEGINNING = "-infinity"


class Purge(Store):
    def delete_due(self, statuses: Collection[Status], limit: int, after: datetime | None) -> DeletedBatch:
        parameters = {
            "after": _BEGINNING if after is None else after,
            "statuses": [status.value for status in statuses],
            "limit": limit,
        }
        with self.connection.cursor() as cursor:
            if not self.is_nested:
                cursor.execute(_DONT_WAIT_FOR_DISK)
            cursor.execute(_DELETE_DUE, parameters)
            row = cursor.fetchone()
        assert row is not None  # a SELECT of aggregates
        deleted, found, reached = row
        return DeletedBatch(deleted, found < limit, reached)
