"""Buffers that upkeep and the admin read, by the size of the table.

A buffer is a page of 8 kB, from the cache or the disk. The figures don't depend on the machine, so releases can be
compared: ``tests/database/test_batches.py`` checks the plans behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from django.contrib.auth import get_user_model
from django.db import connection
from django.test import Client
from django.urls import reverse

from idempotency.operate.erasure import erase_batches, find_rows
from idempotency.operate.purge import purge_batches, purge_body_batches
from idempotency.operate.statistics import stats
from idempotency.operate.sweep import recover_batches
from idempotency.operation import Operation

from .report import Table

#: The smallest table, and the one that ``--rows`` gives.
SIZES = 2
ABANDONED = Operation.declare("benchmarks.abandoned")
CHARGES = Operation.declare("benchmarks.charges")

# Rows in the order of their ids, the oldest first. A fifth is past its retention. "whale" has a fifth of the rows, all
# other accounts have fifty, and all rows of "closed" are among the oldest that are kept. Half of the records keep their
# body for a shorter time, which is over for the oldest 30 %. One in 300 claims is abandoned, of a declared operation or
# of another one.
FILL = """
INSERT INTO idempotency_record (
    account_id, operation, idempotency_key, request_hash, status, lease_expires_at, attempt,
    response_status, response_headers, response_body, body_expires_at, expires_at, created_at, completed_at
)
SELECT
    CASE
        WHEN number %% 5 = 0 THEN 'whale'
        WHEN number %% 20 = 1 AND number BETWEEN %(rows)s * 0.2 AND %(rows)s * 0.25 THEN 'closed'
        ELSE 'account-' || number %% (1 + %(rows)s / 50)
    END,
    CASE WHEN NOT abandoned THEN 'benchmarks.charges' WHEN number %% 2 = 0 THEN 'benchmarks.abandoned'
        ELSE 'benchmarks.elsewhere' END,
    md5(number::text)::uuid::text, 'v1:' || repeat(md5(number::text), 2),
    CASE WHEN abandoned THEN 'in_progress' WHEN number %% 1000 = 11 THEN 'parked' ELSE 'completed' END,
    CASE WHEN abandoned THEN statement_timestamp() - interval '1 s' * number END, 1,
    CASE WHEN NOT abandoned THEN 201 END, CASE WHEN NOT abandoned THEN '[]'::jsonb END,
    CASE WHEN NOT abandoned THEN json_build_object('note', repeat('x', %(body)s)) END,
    CASE WHEN number %% 2 = 0 AND NOT abandoned
        THEN statement_timestamp() + interval '1 day' * (number / %(rows)s::numeric - 0.3)::float END,
    statement_timestamp() + interval '3 days' * (number / %(rows)s::numeric - 0.2)::float,
    statement_timestamp() - interval '1 day', statement_timestamp() - interval '1 day'
FROM (SELECT number, number %% 300 IN (7, 8) AS abandoned FROM generate_series(1, %(rows)s::bigint) AS number) AS made
"""
#: One record in ten has a step.
STEPS = """
INSERT INTO idempotency_step (account_id, record_id, name, result)
SELECT account_id, id, 'charge', '1' FROM idempotency_record WHERE id % 10 = 0
"""
TABLES = ("idempotency_record", "idempotency_step")

BUFFERS = """
SELECT coalesce(sum(heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit
    + coalesce(toast_blks_read + toast_blks_hit + tidx_blks_read + tidx_blks_hit, 0)), 0)
FROM pg_statio_user_tables WHERE relname = ANY(%s)
"""


def fill(rows: int, body: int = 400) -> None:
    """Fill empty tables. ``body`` is the length of a response."""
    with connection.cursor() as cursor:
        cursor.execute(FILL, {"rows": rows, "body": body})
        cursor.execute(STEPS)
        cursor.execute(f"ANALYZE {', '.join(TABLES)}")


def compare(rows: int, seed: int, progress: Callable[[str], None]) -> list[Table]:
    sizes = [rows * 10**power // 10 ** (SIZES - 1) for power in range(SIZES)]
    found: dict[str, list[str]] = {}
    for size in sizes:
        progress(f"upkeep: {size:,} rows")
        with connection.cursor() as cursor:
            cursor.execute(f"TRUNCATE {', '.join(TABLES)} RESTART IDENTITY")
        fill(size)
        with connection.cursor() as cursor:
            cursor.execute(f"VACUUM {', '.join(TABLES)}")
        for name, call in calls(size):
            progress(f"upkeep: {name}")
            found.setdefault(name, []).append(f"{buffers(call):,}")
    table = Table("Buffers of upkeep and admin", ("", *(f"{size:,} rows" for size in sizes)))
    for name, figures in found.items():
        table.add(name, *figures)
    return [table]


def buffers(call: Callable[[], object]) -> int:
    """The number of buffers of the package's tables that a call reads."""
    before = _read()
    call()
    return _read() - before


def _read() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
        cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute(BUFFERS, [list(TABLES)])
        return int(cursor.fetchone()[0])


def calls(rows: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Named calls, each to be made before the next one is taken."""
    staff, _ = get_user_model().objects.get_or_create(username="staff", is_staff=True, is_superuser=True)
    client = Client(headers={"host": "localhost"})
    client.force_login(staff)
    url = reverse("admin:idempotency_idempotencyrecord_changelist")
    kept = rows * 9 // 10 // 20 * 20 + 5  # a record of the whale
    with connection.cursor() as cursor:
        cursor.execute("SELECT idempotency_key FROM idempotency_record WHERE id = %s", [kept])
        (key,) = cursor.fetchone()

    def page(**query: Any) -> None:
        assert client.get(url, query).status_code == 200

    client.get(url)  # reads the content types
    yield "list", page
    yield "list, sorted by retention", partial(page, o="5")
    yield "list of the abandoned", partial(page, state="abandoned")
    yield "list of an account whose records are old", partial(page, q="closed")
    yield "search for an account and a key", partial(page, q=f"whale {key}")
    yield "search for a key", partial(page, q=key)
    yield "statistics", stats
    sweep = recover_batches()
    yield "sweep, first batch of 100", partial(next, sweep, None)
    yield "sweep, next batch", partial(next, sweep, None)
    list(sweep)
    yield "sweep without claims that it can settle", partial(list, recover_batches())
    bodies = purge_body_batches(batch_size=500)
    yield "purge, batch of 500 bodies", partial(next, bodies, None)
    yield "purge, next batch of 500 bodies", partial(next, bodies, None)
    purge = purge_batches(batch_size=500)
    yield "purge, batch of 500 records", partial(next, purge, None)
    account = find_rows("whale")
    yield "erasure, count of the whale", account.count
    erasure = erase_batches(account)
    yield "erasure, batch of 500 records", partial(_first, erasure)
    for _ in purge_batches():
        pass
    yield "list, after a purge and before a vacuum", page
    yield "statistics, after a purge and before a vacuum", stats


def _first(erasure: Iterator[Any]) -> None:
    next(batch for batch in erasure if batch.records)
