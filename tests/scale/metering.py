"""What one operation reads and writes in the server: buffers, log bytes, whole pages in the log, sizes."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from django.db import connection

from idempotency import sql
from idempotency.identity.scope import Scope
from idempotency.outcome import Outcome
from idempotency.protocol.transactions import own_transaction
from idempotency.sql.store import Fence
from tests.benchmarks.instruments import NANOSECONDS, server_cpu

USING = "default"
LEASE = timedelta(seconds=60)
TTL = timedelta(days=3)
REQUEST_HASH = "v1:" + "0" * 64
BODY = json.dumps({"id": str(uuid.uuid4()), "reference": str(uuid.uuid4()), "note": "0" * 300})
OUTCOME = Outcome.stored(201, [["Location", "/charges/12345678/"]], BODY, None)


class Written(NamedTuple):
    """What a session has written to the log."""

    bytes: int
    pages: int

    def since(self, before: Written) -> Written:
        return Written(self.bytes - before.bytes, self.pages - before.pages)


def written() -> Written:
    """What this session has written to the log so far; before PostgreSQL 18, what all sessions have written."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
        of_session = connection.pg_version >= 180000
        source = "pg_stat_get_backend_wal(pg_backend_pid())" if of_session else "pg_stat_wal"
        cursor.execute(f"SELECT wal_bytes, wal_fpi FROM {source}")
        return Written(*map(int, cursor.fetchone()))


def sizes(table: str) -> dict[str, int]:
    """The bytes of the table and of each of its indexes, by name. Of a partitioned table, those of all partitions."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT coalesce(index.relname, %(table)s), sum(pg_total_relation_size(part.relid))::bigint"
            " FROM (SELECT indexrelid AS id FROM pg_index WHERE indrelid = %(table)s::regclass"
            "   UNION ALL SELECT %(table)s::regclass) AS relation"
            " LEFT JOIN pg_class AS index ON index.oid = relation.id AND index.relkind IN ('i', 'I'),"
            " LATERAL (SELECT relid FROM pg_partition_tree(relation.id) UNION SELECT relation.id) AS part(relid)"
            " GROUP BY 1 ORDER BY 1",
            {"table": table},
        )
        found = dict(cursor.fetchall())
    found[table] -= sum(size for name, size in found.items() if name != table)
    return found


@dataclass
class Metered:
    """The measurements of one statement of an operation."""

    seconds: list[float] = field(default_factory=list)
    server_cpu: list[float] = field(default_factory=list)  # seconds
    buffers: list[int] = field(default_factory=list)


class Operation:
    """One operation after another, by the package's own statements, each in a transaction as in a request."""

    def __init__(self, accounts: Callable[[], str]) -> None:
        self.accounts = accounts
        self.store = sql.store(USING)
        self.claim, self.complete, self.replay = Metered(), Metered(), Metered()

    def run(self, *, key: Callable[[], object] = uuid.uuid4) -> None:
        scope = Scope(self.accounts(), "charges.create", str(key()))
        pk = self._time(self.claim, lambda: self._insert(scope))
        fence = Fence(scope, pk, 1, REQUEST_HASH)
        completed = self._time(self.complete, lambda: self._complete(fence))
        row = self._time(self.replay, lambda: self.store.read(scope))
        assert completed
        assert row

    def explain(self) -> None:
        """Run one operation and keep how many buffers each of its statements touched."""
        scope = Scope(self.accounts(), "charges.create", str(uuid.uuid4()))
        with _buffers(self.claim):
            self._insert(scope)
        row = self.store.read(scope)
        assert row
        with _buffers(self.complete):
            self._complete(Fence(scope, row.id, 1, REQUEST_HASH))
        with _buffers(self.replay):
            self.store.read(scope)

    def _insert(self, scope: Scope) -> Any:
        with own_transaction(USING, "A measurement", one_statement=True):
            return self.store.insert_claim(scope, REQUEST_HASH, lease=LEASE, ttl=TTL, wait_for_disk=False)

    def _complete(self, fence: Fence) -> bool:
        with own_transaction(USING, "A measurement", one_statement=True):
            return self.store.complete(fence, OUTCOME, ttl=TTL)

    @staticmethod
    def _time(metered: Metered, call: Callable[[], Any]) -> Any:
        cpu, start = server_cpu() or 0, time.perf_counter()
        result = call()
        metered.seconds.append(time.perf_counter() - start)
        metered.server_cpu.append(((server_cpu() or 0) - cpu) / NANOSECONDS)
        return result


@contextmanager
def _buffers(metered: Metered) -> Iterator[None]:
    """Execute each statement of the block by EXPLAIN first. Then it has nothing to change any more itself."""

    def explain(execute: Any, statement: str, parameters: Any, many: bool, context: Any) -> Any:
        cursor = context["cursor"]
        execute(f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {statement}", parameters, many, context)
        plan = cursor.fetchone()[0][0]["Plan"]
        metered.buffers.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
        return execute(statement, parameters, many, context)

    with connection.execute_wrapper(explain):
        yield
