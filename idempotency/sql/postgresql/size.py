"""PostgreSQL: how big the table is, without reading it."""

from __future__ import annotations

from django.db import connections

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


def measure(using: str) -> tuple[int | None, int | None]:
    """The table's size in bytes with its indexes, and about how many records it holds."""
    with connections[using].cursor() as cursor:
        cursor.execute(_MEASURE)
        size, estimate = cursor.fetchone() or (None, None)
    return size and int(size), None if estimate is None else int(estimate)
