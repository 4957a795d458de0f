"""PostgreSQL: one statement claims, and a claim that is lost writes nothing.

The loser's record is read by a second statement. Folding the read into the insert (a CTE) would save a replay one
round trip and cost every first execution the planning of both; ``docs/explanation/benchmarks.md`` has the figures.

Clocks: ``now()`` stands still for a whole transaction, and the completing update ends one that may have been long, so
every time here is ``statement_timestamp()``. Settings are local to the transaction (``set_config(..., true)``), because
a pooler in transaction mode hands the session to another client right after.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from django.db import OperationalError, connections

from ..lifecycle import Status
from ..outcome import Outcome
from ..scope import Scope
from . import Fence, Row

#: How long a claim waits for another transaction's lock on its record. Locks on a record are held for a COMMIT at most,
#: unless their holder is frozen; then the caller is better served by "in progress" than by waiting for it.
LOCK_TIMEOUT = "1000ms"
#: A claimant frozen between its statement and its COMMIT holds the record's lock until this ends its session.
IDLE_TIMEOUT = "5000ms"
#: An update of one record takes well under a millisecond. One that is still running after this is in trouble, and so
#: would be everybody who waits for its row. COMMIT is not bounded by it: the server stops that clock first.
STATEMENT_TIMEOUT = "5000ms"

# The settings ride in the statement itself, as a SET LOCAL of its own would be one more round trip on every request.
# The row is made before the conflict is looked for, so they are in force before any wait for a lock. The CASE is
# always true; set_config() answers with the value it set.
BOUND_WAITING = f"""set_config('lock_timeout', '{LOCK_TIMEOUT}', true)
    || set_config('idle_in_transaction_session_timeout', '{IDLE_TIMEOUT}', true)"""
WITHOUT_DISK = "set_config('synchronous_commit', 'off', true)"

INSERT_CLAIM = """
INSERT INTO idempotency_record
    (account_id, operation, idempotency_key, request_hash, status, attempt, lease_expires_at, expires_at)
VALUES (%s, %s, %s, %s, CASE WHEN {settings} <> '' THEN 'in_progress' END, 1,
    statement_timestamp() + %s, statement_timestamp() + %s)
ON CONFLICT (account_id, operation, idempotency_key) DO NOTHING
RETURNING id
"""
INSERT_DURABLE_CLAIM = INSERT_CLAIM.format(settings=BOUND_WAITING)
INSERT_FAST_CLAIM = INSERT_CLAIM.format(settings=f"{BOUND_WAITING} || {WITHOUT_DISK}")

# The times are judged by the clock that comes with them: comparing three values here is cheaper than planning it there.
READ = """
SELECT id, attempt, status, request_hash, statement_timestamp(), lease_expires_at, expires_at,
    response_status, response_headers::text, response_body::text, response_reference
FROM idempotency_record
WHERE account_id = %s AND operation = %s AND idempotency_key = %s
"""

OBSERVED = """
WHERE account_id = %s AND operation = %s AND idempotency_key = %s AND id = %s AND attempt = %s AND request_hash = %s
"""

# The lease is judged again under the row's lock: a claim that was renewed, completed or released since it was read
# stays as it is.
TAKE_OVER = f"""
UPDATE idempotency_record
SET status = 'in_progress', attempt = attempt + 1, lease_expires_at = statement_timestamp() + %s
{OBSERVED}
AND (status = 'recoverable' OR (status = 'in_progress' AND lease_expires_at <= statement_timestamp()))
"""

START_OVER = f"""
UPDATE idempotency_record
SET status = 'in_progress', attempt = attempt + 1, request_hash = %s,
    lease_expires_at = statement_timestamp() + %s,
    expires_at = statement_timestamp() + %s,
    created_at = statement_timestamp(), completed_at = NULL,
    response_status = NULL, response_headers = NULL, response_body = NULL, response_reference = NULL
{OBSERVED}
AND expires_at <= statement_timestamp()
AND NOT (status = 'in_progress' AND lease_expires_at > statement_timestamp())
"""

PARK_ABANDONED = f"""
UPDATE idempotency_record
SET status = 'parked', lease_expires_at = NULL
{OBSERVED}
AND status = 'in_progress' AND lease_expires_at <= statement_timestamp()
"""

# The completing update bounds the rest of the business transaction, which is its own COMMIT: a process that freezes in
# between would hold the record's lock. No word of the lease in the next four: an attempt that is late but was not taken
# over still owns its record.
COMPLETE = f"""
UPDATE idempotency_record
SET status = CASE WHEN {BOUND_WAITING} <> '' THEN 'completed' END,
    completed_at = statement_timestamp(), lease_expires_at = NULL,
    response_status = %s, response_headers = %s::jsonb, response_body = %s::json, response_reference = %s
{OBSERVED}
AND status = 'in_progress'
"""

RELEASE = f"""
UPDATE idempotency_record
SET status = 'recoverable', lease_expires_at = NULL
{OBSERVED}
AND status = 'in_progress'
"""

SET_LEASE = f"""
UPDATE idempotency_record
SET lease_expires_at = statement_timestamp() + %s
{OBSERVED}
AND status = 'in_progress'
"""

PARK = f"""
UPDATE idempotency_record
SET status = 'parked', lease_expires_at = NULL
{OBSERVED}
AND status = 'in_progress'
"""


def insert_claim(
    using: str, scope: Scope, request_hash: str, *, lease: timedelta, ttl: timedelta, wait_for_disk: bool
) -> int | None:
    statement = INSERT_DURABLE_CLAIM if wait_for_disk else INSERT_FAST_CLAIM
    parameters: tuple[Any, ...] = (*_named(scope), request_hash, lease, ttl)
    with connections[using].cursor() as cursor:
        cursor.execute(statement, parameters)
        row = cursor.fetchone()
    return None if row is None else int(row[0])


def read(using: str, scope: Scope) -> Row | None:
    with connections[using].cursor() as cursor:
        cursor.execute(READ, _named(scope))
        row = cursor.fetchone()
    if row is None:
        return None
    pk, attempt, status, request_hash, now, lease_expires_at, expires_at, *response = row
    return Row(
        id=pk,
        attempt=attempt,
        status=Status(status),
        request_hash=request_hash,
        lease_left=0.0 if lease_expires_at is None else (lease_expires_at - now).total_seconds(),
        retention_over=expires_at <= now,
        outcome=_outcome(*response) if status == Status.COMPLETED else None,
    )


def _outcome(status: int, headers: str | None, body: str | None, reference: str | None) -> Outcome:
    return Outcome.stored(status, json.loads(headers or "null"), body, reference)


def bound_transaction(using: str, *, idle: timedelta, statement: timedelta) -> None:
    with connections[using].cursor() as cursor:
        cursor.execute(
            "SELECT set_config('idle_in_transaction_session_timeout', %s, true), "
            "set_config('statement_timeout', %s, true)",
            [_milliseconds(idle), _milliseconds(statement)],
        )


def _milliseconds(duration: timedelta) -> str:
    return f"{max(1, int(duration.total_seconds() * 1000))}ms"  # 0 would switch the bound off


def take_over(using: str, scope: Scope, row: Row, lease: timedelta) -> bool:
    return _bounded(using, TAKE_OVER, (lease, *_observed(scope, row)))


def start_over(using: str, scope: Scope, row: Row, request_hash: str, *, lease: timedelta, ttl: timedelta) -> bool:
    return _bounded(using, START_OVER, (request_hash, lease, ttl, *_observed(scope, row)))


def park_abandoned(using: str, scope: Scope, row: Row) -> bool:
    return _bounded(using, PARK_ABANDONED, _observed(scope, row))


def complete(using: str, fence: Fence, outcome: Outcome) -> bool:
    headers = json.dumps(outcome.headers)
    return _changed_one(using, COMPLETE, (outcome.status, headers, outcome.body, outcome.reference, *_fenced(fence)))


def set_lease(using: str, fence: Fence, duration: timedelta) -> bool:
    return _bounded(using, SET_LEASE, (duration, *_fenced(fence)))


def release(using: str, fence: Fence) -> bool:
    return _bounded(using, RELEASE, _fenced(fence))


def park(using: str, fence: Fence) -> bool:
    return _bounded(using, PARK, _fenced(fence))


def _named(scope: Scope) -> tuple[str, str, str]:
    return (scope.account_id, scope.operation, scope.idempotency_key)


def _observed(scope: Scope, row: Row) -> tuple[Any, ...]:
    return (*_named(scope), row.id, row.attempt, row.request_hash)


def _fenced(fence: Fence) -> tuple[Any, ...]:
    return (*_named(fence.scope), fence.id, fence.attempt, fence.request_hash)


def _bounded(using: str, statement: str, parameters: tuple[Any, ...]) -> bool:
    """Run an update in a transaction of ours, where a wait for the row's lock must end, and the update itself too."""
    with connections[using].cursor() as cursor:
        # The clock of a statement is set when it begins, so only this one can bound the next.
        cursor.execute(f"SELECT {BOUND_WAITING}, set_config('statement_timeout', '{STATEMENT_TIMEOUT}', true)")
    return _changed_one(using, statement, parameters)


def _changed_one(using: str, statement: str, parameters: tuple[Any, ...]) -> bool:
    with connections[using].cursor() as cursor:
        cursor.execute(statement, parameters)
        return bool(cursor.rowcount == 1)


def _sqlstate(error: BaseException) -> str:
    """The five characters with which the server named the error; empty where it named none."""
    return getattr(error.__cause__, "sqlstate", None) or ""


def lost_a_race(error: OperationalError) -> bool:
    return _sqlstate(error) in {"40001", "40P01"}  # serialization failure, deadlock


def timed_out_waiting(error: OperationalError) -> bool:
    return _sqlstate(error) == "55P03"  # lock not available


def was_broken_before(error: BaseException) -> bool:
    return _sqlstate(error) == "25P02"  # in failed SQL transaction


def commit_was_refused(error: BaseException) -> bool:
    # Integrity constraint violation (a deferred one is only checked by COMMIT) and transaction rollback. A connection
    # that broke, or a server that was told to stop, may have committed first.
    return _sqlstate(error)[:2] in {"23", "40"}
