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

# The same estimate, made by each shard where it is. If one shard has no estimate or can't be asked, there is none.
_MEASURE_SHARDS = """
SELECT citus_total_relation_size('idempotency_record'),
    CASE WHEN bool_and(success AND result <> '') THEN
        round(sum(CASE WHEN success THEN nullif(result, '')::double precision END))
    END
FROM run_command_on_shards('idempotency_record', $shard$
    SELECT CASE WHEN relpages = 0 AND pg_relation_size(oid) > 0 THEN '' ELSE (greatest(reltuples, 0)
        / greatest(relpages, 1) * pg_relation_size(oid) / current_setting('block_size')::integer)::text END
    FROM pg_class WHERE oid = '%s'::regclass
$shard$)
"""


class Size(Citus):
    def measure(self) -> TableSize:
        with self.connection.cursor() as cursor:
            cursor.execute(_MEASURE_SHARDS if self.is_distributed("idempotency_record") else _MEASURE)
            size, estimate = cursor.fetchone() or (None, None)
        return TableSize(size and int(size), None if estimate is None else int(estimate))
