"""Rows per second that a purge deletes, compared with one unbounded DELETE."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import cast

from django.db import connection

from idempotency.operate.purge import purge_batches

from .instruments import relative
from .report import Table, times

ROUNDS = 3
SIZES = (1000, 5000, 10_000)
PLAIN = "one DELETE"
#: The fraction of records past their retention.
DUE = 0.3
TABLE = "idempotency_record"

# Accounts and keys are UUID4s, an account has 100 records, and a body has 300 to 550 bytes. Records are inserted in
# chronological order, as by clients. Setting the version digit turns the account's digest into a UUID4.
FILL = f"""
INSERT INTO {TABLE} (
    account_id, operation, idempotency_key, request_hash, status, attempt,
    response_status, response_headers, response_body, expires_at, created_at, completed_at
)
SELECT account_id, 'charges.create', idempotency_key, 'v1:' || md5(idempotency_key) || md5(account_id), 'completed', 1,
    201, '[["Location", "/charges/12345678/"]]'::jsonb,
    json_build_object('id', account_id, 'note', repeat(md5(idempotency_key), 7 + number::int %% 8)),
    expires_at, expires_at - interval '3 days', expires_at - interval '3 days' + interval '100 ms'
FROM (
    SELECT number, gen_random_uuid()::text AS idempotency_key,
        overlay(md5('account' || (random() * %(rows)s / 100)::bigint) placing '4' from 13 for 1)::uuid::text
            AS account_id,
        statement_timestamp() + interval '3 days' * (number - %(due)s) / %(rows)s AS expires_at
    FROM generate_series(1, %(rows)s::bigint) AS number
) AS made
"""
DELETE = f"DELETE FROM {TABLE} WHERE expires_at <= %s AND status IN ('completed', 'recoverable')"
NTH_DUE = f"SELECT expires_at FROM {TABLE} ORDER BY expires_at OFFSET %s LIMIT 1"


def compare(rows: int, seed: int, progress: Callable[[str], None]) -> list[Table]:
    lots = random.Random(seed)
    progress(f"purge: {rows:,} rows")
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {TABLE}")
        cursor.execute(FILL, {"rows": rows, "due": int(rows * DUE)})
        cursor.execute(f"VACUUM (ANALYZE) {TABLE}")  # as after an idle hour
    variants: dict[str, Callable[[int], int]] = {PLAIN: delete}
    variants |= {f"batches of {size:,}": partial(purge, size) for size in SIZES}
    share = int(rows * DUE) // ROUNDS // len(variants)
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(ROUNDS):
        for name in lots.sample(list(variants), len(variants)):
            progress(f"purge: round {number + 1}, {name}")
            # A scan marks the index entries of deleted records as dead. Otherwise each variant would do that for the
            # previous one.
            nth_due(share)
            with connection.cursor() as cursor:
                cursor.execute("CHECKPOINT")
            start = time.perf_counter()
            deleted = variants[name](share)
            rates[name].append(deleted / (time.perf_counter() - start))
    table = Table(f"Purge of {rows:,} rows", ("", "rows a second", f"× {PLAIN}"))
    for name, measured in rates.items():
        table.add(name, f"{statistics.median(measured):,.0f}", times(relative(measured, rates[PLAIN])))
    return [table]


def nth_due(number: int) -> datetime:
    """The time at which the first ``number`` records were due."""
    with connection.cursor() as cursor:
        cursor.execute(NTH_DUE, [number - 1])
        ((found,),) = cursor.fetchall()
    return cast(datetime, found)


def delete(share: int) -> int:
    last = nth_due(share)
    with connection.cursor() as cursor:
        cursor.execute(DELETE, [last])
        return int(cursor.rowcount)


def purge(size: int, share: int) -> int:
    deleted = 0
    for batch in purge_batches(batch_size=min(size, share)):
        deleted += batch.deleted
        if deleted >= share:
            break
    return deleted
