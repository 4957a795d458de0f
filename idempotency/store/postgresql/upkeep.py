"""Upkeep on PostgreSQL: the purge and the end of leases, each in one statement, and the queries of system checks."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any

from django.db import DatabaseError, transaction

from ...lifecycle import Status
from ..history import entry
from ..upkeep import PurgedRows, Replication, TableSize, Upkeep
from .statements import HISTORY, NO_DISK, Setting, with_settings

# Locked rows are skipped, because such a row is being claimed again or deleted by another purge. So concurrent purges
# can't deadlock, and they share the work. The SELECT walks the index on expires_at, whose condition it repeats. On a
# partitioned table it merges the indexes of the partitions. It is a CTE, because a join may run a subquery with a LIMIT
# more than once, each time with different rows.
#
# A record may start over after the statement has taken its snapshot, in which it is due. The lock excludes it: under
# READ COMMITTED the server checks the conditions again on the row that it locks, and under REPEATABLE READ it refuses
# the statement. So the DELETE needs no conditions.
#
# The DELETE finds the rows by an array of ids. For a join the planner may read the whole table, especially a
# partitioned one.
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
    RETURNING id, account_id
), steps AS (
    DELETE FROM idempotency_step AS step
    USING deleted
    WHERE step.account_id = deleted.account_id AND step.record_id = deleted.id
)
SELECT (SELECT count(*) FROM deleted), count(*), max(expires_at) FROM due
"""

# As in END_LEASE, a claim may name a session that is younger than the list. So a locked row must still be at the
# attempt that was found. Locked rows are skipped, because a retry or another sweep ends their leases.
_END_LEASES = f"""
WITH gone AS MATERIALIZED (
    SELECT account_id, id, attempt
    FROM idempotency_record
    WHERE status = 'in_progress' AND lease_expires_at > statement_timestamp() AND operation = ANY(%s)
        AND session NOT IN (SELECT pid FROM pg_stat_get_activity(NULL))
    LIMIT %s
), free AS MATERIALIZED (
    SELECT record.id
    FROM gone JOIN idempotency_record AS record USING (account_id, id, attempt)
    WHERE record.status || '' = 'in_progress' AND record.lease_expires_at > statement_timestamp()
    FOR UPDATE OF record SKIP LOCKED
)
UPDATE idempotency_record
SET lease_expires_at = statement_timestamp(), {HISTORY}
WHERE id = ANY(ARRAY(SELECT id FROM free))
"""

# The planner's estimate of the number of rows: the rows per page at the last ANALYZE times the current number of pages.
# A table that was never analysed has no estimate. The rows are in the table itself or, if it is partitioned, in its
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

# A role without pg_monitor gets NULL for the state of each standby, and so counts none. A logical slot belongs to a
# subscriber or another reader of changes, not to a standby.
_REPLICATION = """
SELECT current_setting('synchronous_commit'), current_setting('synchronous_standby_names') <> '', (
    SELECT count(*) FROM pg_stat_replication AS standby
    WHERE standby.state IN ('catchup', 'streaming') AND standby.sync_state = 'async' AND NOT EXISTS (
        SELECT FROM pg_replication_slots AS slot WHERE slot.active_pid = standby.pid AND slot.slot_type = 'logical'
    )
)
"""

# A standby has the same names and ids as its primary, but another start time.
_IDENTITY = "SELECT current_database(), to_regclass('idempotency_record')::oid, pg_postmaster_start_time()"


class PostgreSQLUpkeep(Upkeep):
    """PostgreSQL, whose planner knows its tables and whose server lists its sessions."""

    def bound_transaction(
        self, *, idle: timedelta, statement: timedelta | None = None, wait_for_disk: bool = True
    ) -> None:
        if self.store.is_nested:
            return
        bounds = {"idle_in_transaction_session_timeout": idle, "statement_timeout": statement}
        # 0 would switch a bound off.
        settings = [
            Setting(name, f"{max(1, int(duration.total_seconds() * 1000))}ms")
            for name, duration in bounds.items()
            if duration is not None
        ]
        settings += [] if wait_for_disk else [NO_DISK]
        self.store.row_of(with_settings("SELECT {settings}", tuple(settings)))

    def delete_records(self, statuses: Collection[Status], limit: int, after: datetime | None) -> PurgedRows:
        parameters = {
            "after": "-infinity" if after is None else after,
            "statuses": [status.value for status in statuses],
            "limit": limit,
        }
        with self.connection.cursor() as cursor:
            if not self.store.is_nested:
                # Without statistics, as after a server upgrade, the planner would sort all due rows.
                cursor.execute("SET LOCAL enable_sort = off")
            cursor.execute(_DELETE_RECORDS, parameters)
            return PurgedRows(*cursor.fetchone())

    def end_leases_of_gone_sessions(self, operations: Collection[str], limit: int) -> None:
        try:
            with transaction.atomic(self.using), self.connection.cursor() as cursor:
                cursor.execute(_END_LEASES, [list(operations), limit, entry("session_over")])
        except DatabaseError as error:
            # A role that may not list sessions still settles the claims whose leases are over.
            if not self.store.is_permanent(error):
                raise

    def measure(self) -> TableSize:
        return TableSize(*self.store.row_of(_MEASURE))

    def replication(self) -> Replication:
        return Replication(*self.store.row_of(_REPLICATION))

    def identity(self) -> tuple[Any, ...]:
        return tuple(self.store.row_of(_IDENTITY))

    def is_pooled(self) -> bool:
        # A pooler sends a made-up process id when a client connects, because it doesn't know the server's yet.
        (server,) = self.store.row_of("SELECT pg_backend_pid()")
        return bool(server != self.connection.connection.info.backend_pid)
