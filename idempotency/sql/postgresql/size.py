"""PostgreSQL: how big the table is, without reading it."""

from __future__ import annotations

from ..store import Store, TableSize

# The rows as the planner estimates them: the density of the last analysis times the pages of today. Of a table that was
# never analysed there is no density. What holds rows is the table itself or, of a partitioned one, its partitions.
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


class Size(Store):
    def measure(self) -> TableSize:
        with self.connection.cursor() as cursor:
            cursor.execute(_MEASURE)
            size, estimate = cursor.fetchone() or (None, None)
        return TableSize(size and int(size), None if estimate is None else int(estimate))
