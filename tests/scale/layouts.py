"""Other layouts of the table of records: their size, the log of an operation, and how a purge finds what is due."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.db import connection

from idempotency.sql.postgresql import claims
from tests.benchmarks.report import Table, bytes_of, milliseconds

from .filling import RANDOM_KEY, RECORDS_PER_ACCOUNT, TIME_ORDERED_KEY, account, fill, settle
from .metering import BODY, LEASE, REQUEST_HASH, TTL, sizes, written

TABLE = "scale_layout"
#: This many operations are measured at a time, so many operations after a checkpoint.
BLOCK = 500
LATER = (0, 10_000)
ACCOUNTS = 1000
BATCH = 5000

_SCOPE = "account_id, operation, idempotency_key"
# The indexes are built when the rows are there, which takes a fifth of the time. So an index of which the entries come
# at random is built as full as ``growth`` finds it, where they have come one by one.
_AT_RANDOM = "fillfactor = 73"
INDEXES = {
    "primary key": "ALTER TABLE {table} ADD PRIMARY KEY (id, account_id)",
    "scope": f"ALTER TABLE {{table}} ADD UNIQUE ({_SCOPE}) WITH ({_AT_RANDOM})",
    "expiry": "CREATE INDEX ON {table} (expires_at)",
    "unfinished": "CREATE INDEX ON {table} (status, lease_expires_at)"
    " WHERE status = 'in_progress' OR status = 'recoverable' OR status = 'parked'",
}
_DIGEST = (
    "digest uuid GENERATED ALWAYS AS"
    " (md5(account_id || chr(10) || operation || chr(10) || idempotency_key)::uuid) STORED"
)

# The purge's first part: which records a batch deletes.
_DUE = f"""
SELECT id, account_id FROM {TABLE}
WHERE expires_at <= statement_timestamp() AND status = ANY('{{completed,recoverable}}')
ORDER BY expires_at, id LIMIT {BATCH} FOR UPDATE SKIP LOCKED
"""


@dataclass(frozen=True)
class Layout:
    """A table that differs in some indexes, in the client's keys, or in a setting of the server."""

    name: str
    indexes: Mapping[str, str] = field(default_factory=dict)
    column: str = ""
    key: str = RANDOM_KEY
    setting: str = "RESET wal_compression"
    #: What the claim's insert conflicts with.
    target: str = f"({_SCOPE})"


_KEY_FIRST = "ALTER TABLE {table} ADD UNIQUE (idempotency_key, account_id, operation)"
LAYOUTS = (
    Layout("as it is"),
    Layout("as it is, keys in the order of time", key=TIME_ORDERED_KEY),
    Layout("as it is, `wal_compression = pglz`", setting="SET wal_compression = pglz"),
    Layout("primary key without the account", {"primary key": "ALTER TABLE {table} ADD PRIMARY KEY (id)"}),
    Layout("BRIN on `expires_at`", {"expiry": "CREATE INDEX ON {table} USING brin (expires_at)"}),
    Layout("one more index, on the key", {"key": f"CREATE INDEX ON {{table}} (idempotency_key) WITH ({_AT_RANDOM})"}),
    Layout("unique by key, account, operation", {"scope": f"{_KEY_FIRST} WITH ({_AT_RANDOM})"}),
    Layout("unique by key, account, operation, keys in the order of time", {"scope": _KEY_FIRST}, key=TIME_ORDERED_KEY),
    Layout(
        "unique by a digest of 16 bytes",
        {"scope": f"ALTER TABLE {{table}} ADD UNIQUE (digest) WITH ({_AT_RANDOM})"},
        column=_DIGEST,
        target="(digest)",
    ),
    Layout(
        "exclusion by a hash index on that digest",
        {"scope": "ALTER TABLE {table} ADD EXCLUDE USING hash (digest WITH =)"},
        column=_DIGEST,
        target="",  # an exclusion constraint can't be named by its columns
    ),
)


def compare(rows: int, seed: int, progress: Callable[[str], None]) -> list[Table]:
    logs = [f"log, {later:,} operations after a checkpoint" for later in LATER]
    columns = ("table", "indexes", "a record", "claim", *logs, f"batch of {BATCH:,}")
    table = Table(f"Layouts at {rows:,} rows", ("", *columns))
    for layout in LAYOUTS:
        progress(f"layouts: {layout.name}")
        with connection.cursor() as cursor:
            _create(cursor, layout)
            fill(cursor, TABLE, 0, rows, rows, progress, key=layout.key)
            _index(cursor, layout)
            settle(TABLE)
            found = sizes(TABLE)
            heap = found.pop(TABLE)
            every = (heap, sum(found.values()), heap + sum(found.values()))
            lots = random.Random(seed)
            accounts = [account(lots.randrange(1 + rows // RECORDS_PER_ACCOUNT)) for _ in range(ACCOUNTS)]
            due = _batch(cursor)
            seconds: list[float] = []
            chosen = lots.choices(accounts, k=BLOCK)
            cells = [_log(cursor, layout, later, rows, chosen, seconds) for later in LATER]
            sized = (bytes_of(size / rows) for size in every)
            table.add(layout.name, *sized, milliseconds(statistics.median(seconds)), *cells, milliseconds(due))
            progress(f"layouts: {table.rows[-1]}")
            cursor.execute(f"DROP TABLE {TABLE}")
    return [table]


def _create(cursor: Any, layout: Layout) -> None:
    cursor.execute(f"DROP TABLE IF EXISTS {TABLE}")
    cursor.execute(f"CREATE TABLE {TABLE} (LIKE idempotency_record INCLUDING ALL EXCLUDING INDEXES)")
    if layout.column:
        cursor.execute(f"ALTER TABLE {TABLE} ADD {layout.column}")


def _index(cursor: Any, layout: Layout) -> None:
    for statement in (INDEXES | dict(layout.indexes)).values():
        cursor.execute(statement.format(table=TABLE))


def _log(cursor: Any, layout: Layout, later: int, rows: int, accounts: list[str], seconds: list[float]) -> str:
    insert = claims.INSERT_FAST_CLAIM.replace("idempotency_record", TABLE).replace(
        f"({_SCOPE}) DO", f"{layout.target} DO"
    )
    complete = claims.COMPLETE.replace("idempotency_record", TABLE)
    cursor.execute("CHECKPOINT")
    fill(cursor, TABLE, rows, rows + later, rows, lambda text: None, key=layout.key)
    cursor.execute(f"SELECT {layout.key} FROM generate_series(1, {BLOCK})")
    keys = [key for (key,) in cursor.fetchall()]
    cursor.execute(layout.setting)
    before = written()
    for of_account, key in zip(accounts, keys, strict=True):
        scope = (of_account, "charges.create", key)
        start = time.perf_counter()
        cursor.execute(insert, (*scope, REQUEST_HASH, LEASE, TTL))
        seconds.append(time.perf_counter() - start)
        (pk,) = cursor.fetchone()
        headers = '[["Location", "/charges/12345678/"]]'
        cursor.execute(complete, (TTL, 201, headers, BODY, None, *scope, pk, 1, REQUEST_HASH))
        assert cursor.rowcount == 1
    log = written().since(before)
    cursor.execute("RESET wal_compression")
    return f"{bytes_of(log.bytes / BLOCK)} ({log.pages / BLOCK:.2f})"


def _batch(cursor: Any) -> float:
    """The seconds in which a purge finds the records of its first batch."""
    cursor.execute(f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {_DUE}")
    return float(cursor.fetchone()[0][0]["Execution Time"]) / 1000
