"""The purge on PostgreSQL: a batch is a range of time. If one of its rows is locked, it takes free rows."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict
from datetime import datetime
from typing import Any

from django.utils.dateparse import parse_datetime

from ...lifecycle import Status
from ..store import DeletedBatch, DueRange, Part
from .citus import Citus, Shard

# A batch ends before the record that is one too many. Nothing is locked, so that other jobs can go on from its end. The
# times of the batch are constants for the planner, so that it takes the index over them. However long the process
# sleeps before it deletes, no more records fall into the batch. The state is not asked for here, because it is not in
# the index. So a batch may have fewer records than its range has. The third answer is whether any step was ever stored.
# A step that is stored later is one of a claim, which stays. If the very first one is stored and its claim is released
# before the batch is deleted, the step stays behind, and nobody reads it.
_END = """
SELECT (
    SELECT expires_at
    FROM {records}
    WHERE expires_at <= statement_timestamp() AND expires_at >= %(after)s
    ORDER BY expires_at
    OFFSET %(limit)s
    LIMIT 1
), statement_timestamp(), pg_relation_size('{steps}') > 0
"""
# A range is deleted in half of the time of what is below. But this waits for a row that another transaction has locked.
# If that transaction has claimed the record again, the row is read again then, and the record stays.
_DELETE_RANGE = """
DELETE FROM {records} AS record
WHERE expires_at >= %(after)s AND expires_at < %(end)s AND status = ANY(%(statuses)s)
"""
_DELETE_STEPS = """
DELETE FROM {steps} AS step
USING deleted
WHERE step.account_id = deleted.account_id AND step.record_id = deleted.id
"""
_DELETE_RANGE_WITH_STEPS = f"""
WITH deleted AS ({_DELETE_RANGE} RETURNING record.id, record.account_id), steps AS ({_DELETE_STEPS})
SELECT FROM deleted
"""
# All purges lock the rows in the same order, so that two can't deadlock. They skip locked rows, because such a row is
# being claimed again. The SELECT is a CTE, because a join may run a subquery with a LIMIT more than once, each time
# with other rows. The DELETE finds the rows by where they are, because a join would read all rows that are due. A row
# that is locked stays where it is. The DELETE repeats the conditions, so that it deletes only rows that are due now,
# whatever the SELECT saw; IS TRUE keeps the planner from an index for them. A place is unique in one table, so a
# partitioned table is purged by its partitions.
_DELETE_FREE = f"""
WITH due AS MATERIALIZED (
    SELECT ctid, id, expires_at
    FROM {{records}}
    WHERE {{is_due}} AND expires_at >= %(after)s AND status = ANY(%(statuses)s)
    ORDER BY expires_at, id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
), deleted AS (
    DELETE FROM {{records}} AS record
    WHERE record.ctid = ANY(ARRAY(SELECT ctid FROM due))
        AND (record.{{is_due}} AND record.status = ANY(%(statuses)s)) IS TRUE
    RETURNING record.id, record.account_id
), steps AS ({_DELETE_STEPS})
SELECT {{answer}}
"""
_ANSWER = "(SELECT count(*) FROM deleted), (SELECT count(*) FROM due), (SELECT max(expires_at) FROM due)"


class Purge(Citus):
    def find_due(self, part: Part, limit: int, after: datetime | None) -> DueRange:
        if isinstance(part, Shard) or self._is_distributed_since(part):
            return DueRange(part, after)
        with self.connection.cursor() as cursor:
            parameters = {"after": _start(after), "limit": limit}
            cursor.execute(_END.format(records=part.records, steps=part.steps), parameters)
            ((end, now, has_steps),) = cursor.fetchall()
        if end is not None and end == after:
            # More records than a batch may hold became due at one instant, so a range of time can't divide them.
            return DueRange(part, after, has_steps=has_steps)
        return DueRange(part, after, end or now, is_last=end is None, has_steps=has_steps)

    def delete_due(self, due: DueRange, statuses: Collection[Status], limit: int) -> DeletedBatch:
        part = due.part
        if self._is_distributed_since(part):
            return self._delete_from_each(self.shards(), due, statuses, limit)
        parameters = {
            "after": _start(due.start),
            "end": due.end,
            "statuses": [status.value for status in statuses],
            "limit": limit,
        }
        if isinstance(part, Shard):
            return _batch(limit, *self._delete_from_shard(part, parameters))
        with self.connection.cursor() as cursor:
            if due.end is None:
                cursor.execute(_free(part, "expires_at <= statement_timestamp()", _ANSWER), parameters)
                return _batch(limit, *cursor.fetchone())
            if due.skips_locked:
                cursor.execute(_free(part, "expires_at < %(end)s", _ANSWER), parameters)
                deleted, _, _ = cursor.fetchone()
            else:
                delete = _DELETE_RANGE_WITH_STEPS if due.has_steps else _DELETE_RANGE
                cursor.execute(delete.format(**asdict(part)), parameters)
                deleted = cursor.rowcount
            return DeletedBatch(deleted, due.is_last, due.end if deleted else None)

    def _is_distributed_since(self, part: Part) -> bool:
        """Whether the table was one part when it was listed, and Citus has taken it meanwhile."""
        return part == Part() and self.is_distributed(part.records)

    def _delete_from_shard(self, shard: Shard, parameters: dict[str, Any]) -> Any:
        answer = f"json_build_array({_ANSWER})"
        deleted, found, reached = json.loads(
            self.run_in_shard(shard, lambda now: _free(shard, f"expires_at <= {now}", answer), parameters)
        )
        return deleted, found, reached and parse_datetime(reached)

    def _delete_from_each(
        self, shards: Iterable[Part], due: DueRange, statuses: Collection[Status], limit: int
    ) -> DeletedBatch:
        deleted = 0
        for shard in shards:
            batch = self.delete_due(DueRange(shard, due.start), statuses, limit - deleted)
            deleted += batch.deleted
            if not batch.exhausted:
                return DeletedBatch(deleted, exhausted=False, reached=due.start)
        return DeletedBatch(deleted, exhausted=True, reached=due.start)


def _start(after: datetime | None) -> datetime | str:
    return "-infinity" if after is None else after


def _free(part: Part, is_due: str, answer: str) -> str:
    """:param is_due: a condition that begins with its column, so that the name of a table can be put before it."""
    return _DELETE_FREE.format(records=part.records, steps=part.steps, is_due=is_due, answer=answer)


def _batch(limit: int, deleted: int, found: int, reached: datetime | None) -> DeletedBatch:
    return DeletedBatch(deleted, found < limit, reached)
