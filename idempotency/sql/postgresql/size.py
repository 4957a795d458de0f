"""The size of the table on PostgreSQL, without reading the table."""

from __future__ import annotations

from ..store import TableSize
from .citus import Citus

# The number of rows as the planner estimates it: the rows per page of the last ANALYZE times today's number of pages. A
# table that was never analysed has no estimate. The rows are in the table itself or, if it is partitioned, in its
# partitions.
_MEASURE = """
SELECT sum(pg_total_relation_size(relation.oid)),
    CASE WHEN min(relation.reltuples) >= 0 THEN round(sum(
        relation.reltuples / greatest(relation.relpages, 1)
        * pg_relation_size(relation.oid) / current_setting('block_size')::integer
    )) END
FROM pg_class AS relation
WHERE relation.relkind = 'r'
    AND relation.oid IN (
        SELECT 'idempotency_record'::regclass UNION SELECT relid FROM pg_partition_tree('idempotency_record')
    )
"""

# The same, made by each shard where it is. If one shard has no estimate or can't be asked, there is none. Citus's own
# functions for sizes refuse a transaction that has written.
_MEASURE_SHARDS = """
SELECT CASE WHEN bool_and(size IS NOT NULL) THEN sum(size) END,
    CASE WHEN bool_and(records IS NOT NULL) THEN round(sum(records)) END
FROM (
    SELECT (answer ->> 0)::bigint AS size, (answer ->> 1)::double precision AS records
    FROM (
        SELECT CASE WHEN success THEN result::json END AS answer
        FROM run_command_on_shards('idempotency_record', $shard$
            SELECT json_build_array(
                pg_total_relation_size(oid),
                CASE WHEN relpages > 0 OR pg_relation_size(oid) = 0 THEN
                    greatest(reltuples, 0) / greatest(relpages, 1)
                    * pg_relation_size(oid) / current_setting('block_size')::integer
                END
            )
            FROM pg_class WHERE oid = '%s'::regclass
        $shard$)
    ) AS asked
) AS shards
"""


class Size(Citus):
    def measure(self) -> TableSize:
        with self.connection.cursor() as cursor:
            cursor.execute(_MEASURE_SHARDS if self.is_distributed("idempotency_record") else _MEASURE)
            size, estimate = cursor.fetchone() or (None, None)
        return TableSize(size and int(size), None if estimate is None else int(estimate))
