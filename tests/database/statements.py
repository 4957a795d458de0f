"""Run code just before a statement, and read plans: their text, and on PostgreSQL the number of rows read."""

import json
from contextlib import contextmanager

from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

COMPLETED = """
INSERT INTO idempotency_record (account_id, operation, idempotency_key, request_hash, status, attempt, response_status,
    response_headers, response_body, expires_at, completed_at)
SELECT (number %% 100)::text, 'tests.plans.bulk', 'bulk-' || number, 'v1:' || repeat('0', 64), 'completed', 1, 201,
    '[]', '{"id": 1234567}', statement_timestamp() + interval '3 days', statement_timestamp()
FROM generate_series(1, %s) AS number
"""

SENT = """
INSERT INTO idempotency_outbox_message (message_id, account_id, idempotency_key, topic, payload, headers,
    sender, created_at, status, attempts, next_try_at, sent_at, error)
SELECT gen_random_uuid(), '', 'bulk-' || number, 'orders.placed', '1', '{}', 'tests.outbox.broker',
    statement_timestamp(), 'sent', 1, statement_timestamp(), statement_timestamp() - interval '1 hour', ''
FROM generate_series(1, %s) AS number
"""


def execute(statement, *parameters):
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)


def fill(count):
    """Add completed records, and update the planner's statistics."""
    execute(COMPLETED, count)
    execute("ANALYZE idempotency_record")


def fill_outbox(count):
    """Add messages that were sent an hour ago."""
    execute(SENT, count)


@contextmanager
def before_statement(containing, call):
    """Call ``call`` each time that this connection is about to execute a statement that contains ``containing``."""

    def wrapper(execute, sql, params, many, context):
        if containing in sql:
            call()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        yield


@contextmanager
def explaining(containing):
    """The plans of the block's statements that contain ``containing``, with current statistics."""
    plans, explain = [], "EXPLAIN" if connection.vendor == "postgresql" else "EXPLAIN QUERY PLAN"

    def wrapper(execute, sql, params, many, context):
        if containing in sql:
            with connection.cursor() as cursor:
                cursor.cursor.execute(f"{explain} {sql}", params)
                plans.append("\n".join(line for *_, line in cursor.fetchall()))
        return execute(sql, params, many, context)

    if connection.vendor == "postgresql":
        execute("ANALYZE idempotency_record, idempotency_outbox_message")
    with connection.execute_wrapper(wrapper):
        yield plans


def most_rows_read(call):
    """The largest number of rows that one plan node of ``call``'s statements on records read.

    PostgreSQL's catalogs don't count, because their size doesn't depend on the records.
    """
    with CaptureQueriesContext(connection) as captured:
        call()
    statements = [
        one["sql"]
        for one in captured
        if one["sql"].lstrip().startswith(("SELECT", "UPDATE")) and "idempotency_record" in one["sql"]
    ]
    assert statements
    nodes = [node for statement in statements for node in _plan(statement)]
    return max(_rows(node) for node in nodes if not node.get("Relation Name", "").startswith("pg_"))


def relations_read(statement):
    """The tables and partitions that a statement scans."""
    return {node["Relation Name"] for node in _plan(statement) if node["Node Type"].endswith("Scan")}


def _plan(statement):
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}")
        (found,) = cursor.fetchone()
        transaction.set_rollback(True)
    yield from _walk((json.loads(found) if isinstance(found, str) else found)[0]["Plan"])


def _walk(node):
    yield node
    for child in node.get("Plans", ()):
        yield from _walk(child)


def _rows(node):
    removed = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
    return round((node["Actual Rows"] + removed) * node["Actual Loops"])
