"""Millions of records as real traffic leaves them, made by the server itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from django.db import connection

TABLE = "idempotency_record"

#: An account has this many records.
RECORDS_PER_ACCOUNT = 100
#: This part of the records is past its retention.
DUE = 0.3
#: This many rows are inserted by one statement, so that progress is seen.
CHUNK = 1_000_000
#: This many claims are in progress at a time where records are claimed and completed.
IN_FLIGHT = 10_000

# Accounts are UUID4s, as are the keys by default. Keys come in the order of time, as from clients: the retention of
# record ``number`` ends that much of three days after that of the last record that is due. A body has 300 to 550 bytes.
# No row is compressed, because PostgreSQL tries that from 2 kB on.
_BODY = """json_build_object('id', account_id, 'reference', idempotency_key,
        'note', repeat(md5(idempotency_key), 6 + {number} %% 8))"""
_HEADERS = """'[["Location", "/charges/12345678/"]]'::jsonb"""

FILL = f"""
INSERT INTO {{table}} (
    account_id, operation, idempotency_key, request_hash, status, attempt,
    response_status, response_headers, response_body, expires_at, created_at, completed_at
)
SELECT account_id, operation, idempotency_key, 'v1:' || md5(idempotency_key) || md5(account_id), 'completed', 1,
    201, {_HEADERS}, {_BODY.format(number="number::int")},
    expires_at, expires_at - interval '3 days', expires_at - interval '3 days' + interval '100 ms'
FROM {{made}}
"""
CLAIM = """
INSERT INTO {table}
    (account_id, operation, idempotency_key, request_hash, status, attempt, lease_expires_at, expires_at)
SELECT account_id, operation, idempotency_key, 'v1:' || md5(idempotency_key) || md5(account_id), 'in_progress', 1,
    statement_timestamp() + interval '1 day', expires_at
FROM {made}
"""
COMPLETE = f"""
UPDATE {{table}}
SET status = 'completed', lease_expires_at = NULL, completed_at = statement_timestamp(),
    response_status = 201, response_headers = {_HEADERS}, response_body = {_BODY.format(number="id::int")}
WHERE status = 'in_progress' AND lease_expires_at > statement_timestamp() + interval '12 hours'
"""
_MADE = """(
    SELECT number, {account} AS account_id,
        (ARRAY['charges.create', 'refunds.create', 'payouts.create', 'orders.create'])[1 + number %% 4] AS operation,
        {key} AS idempotency_key,
        statement_timestamp() + interval '3 days' * (number - %(due)s) / %(rows)s AS expires_at
    FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS number
) AS made"""
# The digest has the form of a UUID4 if its version's digit is set.
ACCOUNT = "overlay(md5('account' || (random() * {accounts})::bigint) placing '4' from 13 for 1)::uuid::text"
RANDOM_KEY = "gen_random_uuid()::text"
TIME_ORDERED_KEY = "uuidv7()::text"


def account(number: int) -> str:
    """The account of that number, of which the records have ``RECORDS_PER_ACCOUNT`` each."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT overlay(md5('account' || %s) placing '4' from 13 for 1)::uuid::text", [number])
        return str(cursor.fetchone()[0])


def fill_to(rows: int, progress: Callable[[str], None]) -> None:
    """Let the table of records have at least ``rows`` rows, of which none is dead.

    A smaller table is not added to, because the end of an index would then not be where the new entries go.
    """
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM {TABLE}")
        if cursor.fetchone()[0] < rows:
            cursor.execute(f"TRUNCATE {TABLE}")
            fill(cursor, TABLE, 0, rows, rows, progress)
    settle()


def fill(
    cursor: Any, table: str, first: int, last: int, rows: int, progress: Callable[[str], None], key: str = RANDOM_KEY
) -> None:
    """Insert the completed records after number ``first`` to number ``last`` of a table of ``rows``."""
    statement = FILL.format(table=table, made=_made(rows, key))
    for numbers in _chunks(first, last, rows, CHUNK):
        progress(f"{table}: {numbers['first'] - 1:,} of {last:,} rows")
        cursor.execute(statement, numbers)


def refill(cursor: Any, table: str, first: int, last: int, rows: int, progress: Callable[[str], None]) -> None:
    """The same by claims and completing updates, so that as many dead rows are left as after real traffic."""
    claim = CLAIM.format(table=table, made=_made(rows, RANDOM_KEY))
    for numbers in _chunks(first, last, rows, IN_FLIGHT):
        progress(f"{table}: claiming and completing, {numbers['first'] - 1:,} of {last:,} rows")
        cursor.execute(claim, numbers)
        cursor.execute(COMPLETE.format(table=table), {})


def _made(rows: int, key: str) -> str:
    return _MADE.format(account=ACCOUNT.format(accounts=max(1, rows // RECORDS_PER_ACCOUNT)), key=key)


def _chunks(first: int, last: int, rows: int, size: int) -> Iterator[dict[str, int]]:
    for done in range(first, last, size):
        yield {"first": done + 1, "last": min(done + size, last), "rows": rows, "due": int(rows * DUE)}


def settle(table: str = TABLE) -> None:
    """Leave the table as a quiet hour does: no dead rows, known statistics, every page on disk."""
    with connection.cursor() as cursor:
        cursor.execute(f"VACUUM (ANALYZE) {table}")
        cursor.execute("CHECKPOINT")
