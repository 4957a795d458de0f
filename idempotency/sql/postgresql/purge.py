"""The purge on PostgreSQL: a batch is a range of time. If one of its rows is locked, it takes free rows."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict
from datetime import datetime
from typing import Any

from django.db import OperationalError, transaction
from django.utils.dateparse import parse_datetime

from ...lifecycle import Status
from ..store import DeletedBatch, Part
from .citus import Citus, Shard

# COMMIT need not wait for the disk, because it is harmless to lose a batch in a crash of the server: the next run
# deletes it again. A new claim of a purged key comes later in the same log, so it can't survive without the deletion.
_DONT_WAIT_FOR_DISK = "SET LOCAL synchronous_commit = off"

# A batch ends before the record that is one too many. The times of the batch are constants for the planner, so that it
# takes the index over them. If the process sleeps before the next statement, no more records fall into the batch. The
# state is not asked for here, because it is not in the index. So a batch may have fewer records than its range has.
# The third answer is whether any step was ever stored. A step that is stored later is one of a claim.
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
# The batch has locked many rows already when it waits for one. So it waits for less time than anybody who waits for it.
_WAIT_BRIEFLY = "SET LOCAL lock_timeout = '100ms'"

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
    WHERE expires_at <= {{now}} AND expires_at >= %(after)s AND status = ANY(%(statuses)s)
    ORDER BY expires_at, id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
), deleted AS (
    DELETE FROM {{records}} AS record
    WHERE record.ctid = ANY(ARRAY(SELECT ctid FROM due))
        AND (record.expires_at <= {{now}} AND record.status = ANY(%(statuses)s)) IS TRUE
    RETURNING record.id, record.account_id
), steps AS ({_DELETE_STEPS})
SELECT {{answer}}
"""
_ANSWER = "(SELECT count(*) FROM deleted), (SELECT count(*) FROM due), (SELECT max(expires_at) FROM due)"

_BEGINNING = "-infinity"


class Purge(Citus):
    def delete_due(self, part: Part, statuses: Collection[Status], limit: int, after: datetime | None) -> DeletedBatch:
        if part == Part() and (shards := self.shards()):
            return self._delete_from_each(shards, statuses, limit, after)
        parameters = {
            "after": _BEGINNING if after is None else after,
            "statuses": [status.value for status in statuses],
            "limit": limit,
        }
        if isinstance(part, Shard):
            return _batch(limit, *self._delete_from_shard(part, parameters))
        with self.connection.cursor() as cursor:
            if not self.is_nested:
                cursor.execute(_DONT_WAIT_FOR_DISK)
            cursor.execute(_END.format(records=part.records, steps=part.steps), parameters)
            ((end, now, has_steps),) = cursor.fetchall()
            # If more records than a batch may hold became due at one instant, a range of time can't divide them.
            if end is None or end != after:
                delete = _DELETE_RANGE_WITH_STEPS if has_steps else _DELETE_RANGE
                deleted = self._delete_range(cursor, delete.format(**asdict(part)), {**parameters, "end": end or now})
                if deleted is not None:
                    reached = end or (now if deleted else None)
                    return DeletedBatch(deleted, exhausted=end is None and deleted < limit, reached=reached)
            cursor.execute(_free(part, "statement_timestamp()", _ANSWER), parameters)
            return _batch(limit, *cursor.fetchone())

    def _delete_range(self, cursor: Any, delete: str, parameters: dict[str, Any]) -> int | None:
        """:returns: how many records were deleted, or None if another transaction holds one of them."""
        in_test_case = self.is_nested  # and not because of the savepoint
        try:
            with transaction.atomic(using=self.using):
                if not in_test_case:
                    cursor.execute(_WAIT_BRIEFLY)
                cursor.execute(delete, parameters)
                return int(cursor.rowcount)
        except OperationalError as error:
            if not self.timed_out_waiting(error):
                raise
            return None

    def _delete_from_shard(self, shard: Shard, parameters: dict[str, Any]) -> Any:
        answer = f"json_build_array({_ANSWER})"
        deleted, found, reached = json.loads(
            self.run_in_shard(shard, lambda now: _free(shard, now, answer), parameters)
        )
        return deleted, found, reached and parse_datetime(reached)

    def _delete_from_each(
        self, shards: Iterable[Part], statuses: Collection[Status], limit: int, after: datetime | None
    ) -> DeletedBatch:
        deleted = 0
        for shard in shards:
            batch = self.delete_due(shard, statuses, limit - deleted, after)
            deleted += batch.deleted
            if not batch.exhausted:
                return DeletedBatch(deleted, exhausted=False, reached=after)
        return DeletedBatch(deleted, exhausted=True, reached=after)


def _free(part: Part, now: str, answer: str) -> str:
    return _DELETE_FREE.format(records=part.records, steps=part.steps, now=now, answer=answer)


def _batch(limit: int, deleted: int, found: int, reached: datetime | None) -> DeletedBatch:
    return DeletedBatch(deleted, found < limit, reached)
