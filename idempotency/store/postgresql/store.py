"""The store of PostgreSQL: messages, counters, the purge and what checks ask. ``statements.py`` has the claims."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from ...lifecycle import Status
from ..base import Replication, TableSize, Taken
from .statements import NO_DISK, RecordStore

if TYPE_CHECKING:
    from ...outbox.models import OutboxMessage

# If the message exists already, that is no error, because an error would break the caller's transaction. After an
# attempt was cut off, the next one normally finds its messages.
_INSERT_MESSAGE = """
INSERT INTO idempotency_outbox_message (message_id, account_id, idempotency_key, topic, sender, payload, headers,
    ordering_key, status, attempts, error, next_try_at)
VALUES (%s, %s, %s, %s, %s, %s::json, %s::jsonb, %s, 'pending', 0, '', statement_timestamp() + %s)
ON CONFLICT (message_id) DO NOTHING
RETURNING id, created_at, next_try_at
"""

# The wait for a lock is bounded, because another process adds to the same rows in milliseconds. COMMIT need not wait
# for the disk: if the server crashes, it may lose the last counts, which is acceptable for statistics. All processes
# lock the rows in the same order, so that no two of them can deadlock.
_ADD_COUNTS = """
INSERT INTO idempotency_dashboard_counter AS counter (hour, operation, event, total)
SELECT hour, operation, event, total
FROM unnest(ARRAY[0, %s::integer]) AS hour,
    unnest(%s::text[], %s::text[], %s::bigint[]) AS counted (operation, event, total)
WHERE {settings}
ORDER BY hour, operation COLLATE "C", event COLLATE "C"
ON CONFLICT (hour, operation, event) DO UPDATE SET total = counter.total + excluded.total
"""

# Locked rows are skipped, because such a row is being claimed again or deleted by another purge. So purges that run at
# once can't deadlock, and share the work. The SELECT walks the index on expires_at, whose condition it repeats; of a
# partitioned table, it merges those of the partitions. It is a CTE, because a join may run a subquery with a LIMIT more
# than once, each time with other rows.
#
# The DELETE finds the rows by an array of their ids. For a join the planner may read the whole table, above all if that
# is partitioned. The DELETE sees the rows as they were when the statement began, so it repeats the conditions on what
# they are by now. IS TRUE keeps the planner from an index for them, which would find all records that are due.
_DELETE_RECORDS = """
WITH due AS MATERIALIZED (
    SELECT id, expires_at
    FROM idempotency_record
    WHERE expires_at <= statement_timestamp() AND expires_at >= %(after)s AND status = ANY(%(statuses)s)
        AND status <> 'in_progress'
    ORDER BY expires_at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
), deleted AS (
    DELETE FROM idempotency_record
    WHERE id = ANY(ARRAY(SELECT id FROM due))
        AND (expires_at <= statement_timestamp() AND status = ANY(%(statuses)s)) IS TRUE
    RETURNING id, account_id
), steps AS (
    DELETE FROM idempotency_step AS step
    USING deleted
    WHERE step.account_id = deleted.account_id AND step.record_id = deleted.id
)
SELECT (SELECT count(*) FROM deleted), count(*), max(expires_at) FROM due
"""

# The number of rows as the planner estimates it: the rows per page of the last ANALYZE times today's number of pages. A
# table that was never analysed has no estimate. The rows are in the table itself or, if it is partitioned, in its
# partitions.
_MEASURE = """
SELECT sum(pg_total_relation_size(relation.oid))::bigint,
    CASE WHEN min(relation.reltuples) >= 0 THEN round(sum(
        relation.reltuples / greatest(relation.relpages, 1)
        * pg_relation_size(relation.oid) / current_setting('block_size')::integer
    ))::bigint END
FROM pg_class AS relation
WHERE relation.relkind = 'r'
    AND relation.oid IN (
        SELECT 'idempotency_record'::regclass UNION SELECT relid FROM pg_partition_tree('idempotency_record')
    )
"""

# A role without the rights of pg_monitor gets NULL for the state of each standby, and so counts none. A subscriber or
# another reader of changes is no standby: its slot is a logical one.
_REPLICATION = """
SELECT current_setting('synchronous_commit'), current_setting('synchronous_standby_names') <> '', (
    SELECT count(*) FROM pg_stat_replication AS standby
    WHERE standby.state IN ('catchup', 'streaming') AND standby.sync_state = 'async' AND NOT EXISTS (
        SELECT FROM pg_replication_slots AS slot WHERE slot.active_pid = standby.pid AND slot.slot_type = 'logical'
    )
)
"""

# A standby has the names and numbers of its primary, but starts at another time.
_IDENTITY = "SELECT current_database(), to_regclass('idempotency_record')::oid, pg_postmaster_start_time()"


class PostgreSQLStore(RecordStore):
    """PostgreSQL. Each change is one statement."""

    def insert_message(self, message: OutboxMessage, delay: timedelta) -> bool:
        scope = (message.message_id, message.account_id, message.idempotency_key)
        content = (message.topic, message.sender, message.payload, json.dumps(message.headers), message.ordering_key)
        row = self.row_of(_INSERT_MESSAGE, (*scope, *content, delay))
        if row is None:
            return False
        message.pk, message.created_at, message.next_try_at = row
        return True

    def add_counts(self, counts: Mapping[tuple[str, str], int], hour: int) -> None:
        operations, events = [operation for operation, _ in counts], [event for _, event in counts]
        parameters: list[Any] = [hour, operations, events, list(counts.values())]
        with self.connection.cursor() as cursor:
            self._execute(cursor, _ADD_COUNTS, parameters, *self._bounds(), NO_DISK)

    def delete_records(self, statuses: Collection[Status], limit: int, after: datetime | None) -> Taken:
        parameters = {
            "after": "-infinity" if after is None else after,
            "statuses": [status.value for status in statuses],
            "limit": limit,
        }
        with self.connection.cursor() as cursor:
            if not self.is_nested:
                # A planner without statistics, as after an upgrade of the server, would sort all that is due.
                cursor.execute("SET LOCAL enable_sort = off")
            cursor.execute(_DELETE_RECORDS, parameters)
            return Taken(*cursor.fetchone())

    def measure(self) -> TableSize:
        return TableSize(*self.row_of(_MEASURE))

    def replication(self) -> Replication:
        return Replication(*self.row_of(_REPLICATION))

    def identity(self) -> tuple[Any, ...]:
        return tuple(self.row_of(_IDENTITY))

    def is_pooled(self) -> bool:
        # A pooler names a process of its own when a client connects, because it doesn't know the server's yet.
        (server,) = self.row_of("SELECT pg_backend_pid()")
        return bool(server != self.connection.connection.info.backend_pid)
