"""The purge on PostgreSQL: one statement purges a batch."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from ...lifecycle import Status
from ..store import DeletedBatch, Part, Store

# COMMIT need not wait for the disk, because it is harmless to lose a batch in a crash of the server: the next run
# deletes it again. A new claim of a purged key comes later in the same log, so it can't survive without the deletion.
_DONT_WAIT_FOR_DISK = "SET LOCAL synchronous_commit = off"

# All purges lock the rows in the same order, so that two can't deadlock. They skip locked rows, because such a row is
# being claimed again. The SELECT is a CTE, because a join may run a subquery with a LIMIT more than once, each time
# with other rows. The DELETE finds the rows by where they are, because a join would read all rows that are due. A row
# that is locked stays where it is. The DELETE repeats the conditions, so that it deletes only rows that are due now,
# whatever the SELECT saw; IS TRUE keeps the planner from an index for them. A place is unique in one table, so a
# partitioned table is purged by its partitions.
_DELETE_DUE = """
WITH due AS MATERIALIZED (
    SELECT ctid, id, expires_at
    FROM {records}
    WHERE expires_at <= statement_timestamp() AND expires_at >= %(after)s AND status = ANY(%(statuses)s)
    ORDER BY expires_at, id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
), deleted AS (
    DELETE FROM {records} AS record
    WHERE record.ctid = ANY(ARRAY(SELECT ctid FROM due))
        AND (record.expires_at <= statement_timestamp() AND record.status = ANY(%(statuses)s)) IS TRUE
    RETURNING record.id, record.account_id
), steps AS (
    DELETE FROM {steps} AS step
    USING deleted
    WHERE step.account_id = deleted.account_id AND step.record_id = deleted.id
)
SELECT (SELECT count(*) FROM deleted), (SELECT count(*) FROM due), (SELECT max(expires_at) FROM due)
"""

_BEGINNING = "-infinity"


class Purge(Store):
    def delete_due(self, part: Part, statuses: Collection[Status], limit: int, after: datetime | None) -> DeletedBatch:
        parameters = {
            "after": _BEGINNING if after is None else after,
            "statuses": [status.value for status in statuses],
            "limit": limit,
        }
        with self.connection.cursor() as cursor:
            if not self.is_nested:
                cursor.execute(_DONT_WAIT_FOR_DISK)
            cursor.execute(_DELETE_DUE.format(records=part.records, steps=part.steps), parameters)
            row = cursor.fetchone()
        assert row is not None  # a SELECT of aggregates
        deleted, found, reached = row
        return DeletedBatch(deleted, found < limit, reached)
