"""The purge on PostgreSQL: one statement purges a batch."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Any

from django.db import OperationalError
from django.utils.dateparse import parse_datetime

from ...lifecycle import Status
from ..store import DeletedBatch, Part
from .citus import Citus, Shard

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
    WHERE expires_at <= {now} AND expires_at >= %(after)s AND status = ANY(%(statuses)s)
    ORDER BY expires_at, id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
), deleted AS (
    DELETE FROM {records} AS record
    WHERE record.ctid = ANY(ARRAY(SELECT ctid FROM due))
        AND (record.expires_at <= {now} AND record.status = ANY(%(statuses)s)) IS TRUE
    RETURNING record.id, record.account_id
), steps AS (
    DELETE FROM {steps} AS step
    USING deleted
    WHERE step.account_id = deleted.account_id AND step.record_id = deleted.id
)
SELECT {answer}
"""
_ANSWER = "(SELECT count(*) FROM deleted), (SELECT count(*) FROM due), (SELECT max(expires_at) FROM due)"

# On Citus, a batch is run by the worker that has the shard, in a transaction of its own, because a statement that the
# coordinator plans can't lock the rows of a shard by such conditions. A row is due by the clock of the coordinator, as
# it is for every other statement.
_WORKER = "SELECT nodename, nodeport, statement_timestamp()::text FROM pg_dist_shard_placement WHERE shardid = %s"
_RUN_ON_WORKER = "SELECT success, result FROM master_run_on_worker(ARRAY[%s], ARRAY[%s], ARRAY[%s], false)"

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
        delete = self._delete_from_shard if isinstance(part, Shard) else self._delete_from_table
        deleted, found, reached = delete(part, parameters)
        return DeletedBatch(deleted, found < limit, reached)

    def _delete_from_table(self, part: Part, parameters: dict[str, Any]) -> Any:
        with self.connection.cursor() as cursor:
            if not self.is_nested:
                cursor.execute(_DONT_WAIT_FOR_DISK)
            cursor.execute(_statement(part, "statement_timestamp()", _ANSWER), parameters)
            return cursor.fetchone()

    def _delete_from_shard(self, shard: Any, parameters: dict[str, Any]) -> Any:
        # If the process dies or sleeps at any point here, the worker ends the statement, or never gets it. It deletes
        # what is due in both cases.
        operations: Any = self.connection.ops
        with self.connection.cursor() as cursor:
            cursor.execute(_WORKER, [shard.id])
            ((node, port, now),) = cursor.fetchall()
            statement = _statement(shard, f"'{now}'::timestamptz", f"json_build_array({_ANSWER})")
            cursor.execute(_RUN_ON_WORKER, [node, port, operations.compose_sql(statement, parameters)])
            ((success, result),) = cursor.fetchall()
        if not success:
            raise OperationalError(f"Server {node} refused: {result}")
        deleted, found, reached = json.loads(result)
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


def _statement(part: Part, now: str, answer: str) -> str:
    return _DELETE_DUE.format(records=part.records, steps=part.steps, now=now, answer=answer)
