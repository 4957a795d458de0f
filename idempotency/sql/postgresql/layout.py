"""Hash partitions on PostgreSQL: records and their steps are split by account, both in the same way.

Every statement on a record names its account, so it reads one partition. The purge takes one partition after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import NotSupportedError

from ..store import Part, Store

TABLES = ("idempotency_record", "idempotency_step")

#: How long to wait for requests that have a transaction open. All new claims wait behind this lock.
LOCK_TIMEOUT = "2s"

# Partitions of records and of steps belong together if they hold the same accounts.
_PARTS = """
SELECT records.relid::regclass::text, coalesce(steps.relid, 'idempotency_step'::regclass)::regclass::text
FROM pg_partition_tree('idempotency_record') AS records
JOIN pg_class AS record ON record.oid = records.relid
LEFT JOIN (
    pg_partition_tree('idempotency_step') AS steps JOIN pg_class AS step ON step.oid = steps.relid
) ON steps.isleaf AND pg_get_expr(step.relpartbound, step.oid) = pg_get_expr(record.relpartbound, record.oid)
WHERE records.isleaf
ORDER BY 1
"""

_TABLE = """
SELECT quote_ident(nspname) || '.', relkind, array_to_string(reloptions, ', '), pg_get_serial_sequence(relation, 'id'),
    CASE WHEN relrowsecurity THEN 'row security' END,
    (SELECT 'trigger ' || min(tgname) FROM pg_trigger WHERE tgrelid = pg_class.oid AND NOT tgisinternal),
    (SELECT 'publication ' || min(pubname) FROM pg_publication_tables
        WHERE schemaname = nspname AND tablename = relname)
FROM pg_class
JOIN pg_namespace ON pg_namespace.oid = relnamespace, (SELECT %(table)s::text AS relation) AS asked
WHERE pg_class.oid = relation::regclass
"""

_INDEXES = """
SELECT format('ALTER TABLE %%s ADD CONSTRAINT %%I %%s', %(table)s, conname,
    CASE contype WHEN 'p' THEN 'PRIMARY KEY (id, account_id)' ELSE pg_get_constraintdef(oid) END)
FROM pg_constraint
WHERE conrelid = %(table)s::regclass AND contype IN ('p', 'u')
UNION ALL
SELECT pg_get_indexdef(indexrelid)
FROM pg_index
WHERE indrelid = %(table)s::regclass AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = indexrelid)
"""

_GRANTS = """
SELECT privilege_type, CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END
FROM pg_class, aclexplode(relacl)
WHERE oid = %s::regclass AND grantee <> relowner
"""


@dataclass(frozen=True)
class _Table:
    """What a table has, and what its successor has to have."""

    name: str
    schema: str  # with a dot
    storage: str
    sequence: str
    indexes: Sequence[str]
    grants: Sequence[tuple[str, str]]
    sequence_grants: Sequence[tuple[str, str]]


class Layout(Store):
    def parts(self) -> list[Part]:
        with self.connection.cursor() as cursor:
            cursor.execute(_PARTS)
            return [Part(*names) for names in cursor.fetchall()] or super().parts()

    def plan_partitions(self, count: int) -> list[str]:
        return [
            f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'",
            f"LOCK TABLE {', '.join(TABLES)} IN ACCESS EXCLUSIVE MODE",
            "SET LOCAL lock_timeout = 0",
            *(statement for name in TABLES for statement in _rebuilt(self._examine(name), count)),
        ]

    def _examine(self, name: str) -> _Table:
        with self.connection.cursor() as cursor:

            def rows(query: str, parameters: Any) -> list[Any]:
                cursor.execute(query, parameters)
                return list(cursor.fetchall())

            ((schema, kind, storage, sequence, *obstacles),) = rows(_TABLE, {"table": name})
            if kind == "p":
                raise NotSupportedError(f"Table {name} is partitioned already.")
            if sequence is None:
                obstacles.append("an id without a sequence of its own")
            if found := [obstacle for obstacle in obstacles if obstacle]:
                raise NotSupportedError(f"Table {name} has what its partitions would not have: {', '.join(found)}.")
            return _Table(
                name,
                schema,
                f" WITH ({storage})" if storage else "",
                sequence,
                [statement for (statement,) in rows(_INDEXES, {"table": name})],
                rows(_GRANTS, [name]),
                rows(_GRANTS, [sequence]),
            )


def _rebuilt(table: _Table, count: int) -> Iterator[str]:
    """The statements that put a partitioned table in the place of a table."""
    old = f"{table.schema}{table.name}"
    new = f"{old}_partitioned"
    parts = [f"{old}_p{number}" for number in range(count)]
    sequence = f"{table.name}_id_seq"
    yield (
        f"CREATE TABLE {new} (LIKE {old} INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING COMMENTS "
        f"INCLUDING STORAGE) PARTITION BY HASH (account_id)"
    )
    for number, part in enumerate(parts):
        bound = f"WITH (MODULUS {count}, REMAINDER {number})"
        yield f"CREATE TABLE {part} PARTITION OF {new} FOR VALUES {bound}{table.storage}"
    # An id is never given twice, because it is a part of the fence.
    yield f"CREATE SEQUENCE {new}_id_seq"
    yield f"SELECT setval('{new}_id_seq', nextval('{table.sequence}'))"
    yield f"INSERT INTO {new} SELECT * FROM {old}"
    yield f"DROP TABLE {old}"
    yield f"ALTER TABLE {new} RENAME TO {table.name}"
    yield f"ALTER SEQUENCE {new}_id_seq RENAME TO {sequence}"
    yield f"ALTER SEQUENCE {table.schema}{sequence} OWNED BY {old}.id"
    yield f"ALTER TABLE {old} ALTER COLUMN id SET DEFAULT nextval('{table.schema}{sequence}')"
    yield from table.indexes
    for privilege, role in table.grants:
        yield f"GRANT {privilege} ON {', '.join([old, *parts])} TO {role}"
    for privilege, role in table.sequence_grants:
        yield f"GRANT {privilege} ON SEQUENCE {table.schema}{sequence} TO {role}"
    yield f"ANALYZE {old}"
