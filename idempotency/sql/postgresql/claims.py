"""The statements on claims: one statement claims, and a claim that is lost writes nothing.

The loser's record is read by a second statement. Folding the read into the insert (a CTE) would save a replay one
round trip and cost every first execution the planning of both; ``docs/explanation/benchmarks.md`` has the figures.

Clocks: ``now()`` stands still for a whole transaction, and the completing update ends one that may have been long, so
every time here is ``statement_timestamp()``. Settings are local to the transaction (``set_config(..., true)``), because
a pooler in transaction mode hands the session to another client right after.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ...identity.scope import Scope
from ...lifecycle import Status
from ...outcome import Outcome
from ..store import UNDECIDED_CLASSES, Fence, Row, Store
from ..watch import TransactionWatch

#: How long a claim waits for another transaction's lock on its record. Locks on a record are held for a COMMIT at most,
#: unless their holder is frozen; then the caller is better served by "in progress" than by waiting for it.
LOCK_TIMEOUT = "1000ms"
#: A process that freezes between its statement and its COMMIT holds the record's lock until this ends its session.
IDLE_TIMEOUT = "5000ms"

#: libpq's PQTRANS_IDLE: no transaction is open.
TRANSACTION_IDLE = 0
#: libpq's PQTRANS_INTRANS: a transaction is open, and no statement of it has failed.
TRANSACTION_SOUND = 2

# Settings travel in a statement that is sent anyway, because a SET LOCAL of its own would be one more round trip on
# every request. set_config() returns the value that it has set, so the comparison is always true. The server computes
# it before it waits for any lock.
BOUND_WAITING = f"set_config('lock_timeout', '{LOCK_TIMEOUT}', true)"
BOUND_IDLING = f"set_config('idle_in_transaction_session_timeout', '{IDLE_TIMEOUT}', true)"
WITHOUT_DISK = "set_config('synchronous_commit', 'off', true)"

# A claim is a transaction of its own, in which nothing can idle. A CASE costs less than the SELECT of a WHERE clause.
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
INSERT_CLAIM_IN_TEST = INSERT_CLAIM.format(settings="'none'")

# The server judges the times, because to read a timestamp into Python takes longer.
READ = """
SELECT id, attempt, status, request_hash,
    extract(epoch FROM lease_expires_at - statement_timestamp())::double precision, expires_at <= statement_timestamp(),
    response_status, response_headers::text, response_body::text, response_reference
FROM idempotency_record
WHERE account_id = %s AND operation = %s AND idempotency_key = %s
"""

OBSERVED = """
WHERE account_id = %s AND operation = %s AND idempotency_key = %s AND id = %s AND attempt = %s AND request_hash = %s
"""

# A status is compared as an expression, so that the planner can't take the partial index of unfinished records: that
# one would be read from end to end, every claim in progress, to find one record. Under SERIALIZABLE each of those reads
# is a conflict with another request.
FENCED = f"""{OBSERVED} AND status || '' = 'in_progress'"""

# An outcome and an owner are kept for the whole retention from the moment they are written.
KEEP = "greatest(expires_at, statement_timestamp() + %s)"

# The lease is judged again under the row's lock: a claim that was renewed, completed or released since it was read
# stays as it is.
TAKE_OVER = f"""
UPDATE idempotency_record
SET status = 'in_progress', attempt = attempt + 1, lease_expires_at = statement_timestamp() + %s, expires_at = {KEEP}
{OBSERVED}
AND (status || '' = 'recoverable' OR (status || '' = 'in_progress' AND lease_expires_at <= statement_timestamp()))
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
AND NOT (status || '' = 'in_progress' AND lease_expires_at > statement_timestamp())
"""

PARK_ABANDONED = f"""
UPDATE idempotency_record
SET status = 'parked', lease_expires_at = NULL
{FENCED}
AND lease_expires_at <= statement_timestamp()
"""

# No word of the lease in the next four: an attempt that is late but was not taken over still owns its record.
#
# The completing update is the last statement of the business transaction. All that may still wait then is this process,
# frozen before it sends COMMIT, and that is what its one setting bounds. It waits for a lock as long as the lock's
# holder may hold it, because a lock timeout would go on into COMMIT, which checks deferred foreign keys and may wait
# for rows of the handler's.
COMPLETE = f"""
UPDATE idempotency_record
SET status = 'completed', completed_at = statement_timestamp(), lease_expires_at = NULL, expires_at = {KEEP},
    response_status = %s, response_headers = %s::jsonb, response_body = %s::json, response_reference = %s
{FENCED}
"""

RELEASE = f"""
UPDATE idempotency_record
SET status = 'recoverable', lease_expires_at = NULL
{FENCED}
"""

SET_LEASE = f"""
UPDATE idempotency_record
SET lease_expires_at = statement_timestamp() + %s, expires_at = {KEEP}
{FENCED}
"""

PARK = f"""
UPDATE idempotency_record
SET status = 'parked', lease_expires_at = NULL
{FENCED}
"""


@cache
def _with_settings(update: str, settings: str) -> str:
    """An update that makes settings for its transaction. Each update above ends in a condition."""
    return f"{update} AND (SELECT {settings}) <> ''"


class Claims(Store):
    """Claims, the transactions around them, and what the server's errors mean."""

    def insert_claim(
        self, scope: Scope, request_hash: str, *, lease: timedelta, ttl: timedelta, wait_for_disk: bool
    ) -> int | None:
        statement = INSERT_DURABLE_CLAIM if wait_for_disk else INSERT_FAST_CLAIM
        parameters: tuple[Any, ...] = (*_parts(scope), request_hash, lease, ttl)
        with self.connection.cursor() as cursor:
            cursor.execute(INSERT_CLAIM_IN_TEST if self.is_nested else statement, parameters)
            row = cursor.fetchone()
        return None if row is None else int(row[0])

    def read(self, scope: Scope) -> Row | None:
        with self.connection.cursor() as cursor:
            cursor.execute(READ, _parts(scope))
            row = cursor.fetchone()
        if row is None:
            return None
        pk, attempt, status, request_hash, lease_left, retention_over, *response = row
        return Row(
            id=pk,
            attempt=attempt,
            status=Status(status),
            request_hash=request_hash,
            lease_left=lease_left or 0.0,
            retention_over=retention_over,
            outcome=_outcome(*response) if status == Status.COMPLETED else None,
        )

    def take_over(self, scope: Scope, row: Row, *, lease: timedelta, ttl: timedelta) -> bool:
        return self._change_one(TAKE_OVER, (lease, ttl, *_observed(scope, row)))

    def start_over(self, scope: Scope, row: Row, request_hash: str, *, lease: timedelta, ttl: timedelta) -> bool:
        return self._change_one(START_OVER, (request_hash, lease, ttl, *_observed(scope, row)))

    def park_abandoned(self, scope: Scope, row: Row) -> bool:
        return self._change_one(PARK_ABANDONED, _observed(scope, row))

    def set_lease(self, fence: Fence, duration: timedelta, *, ttl: timedelta) -> bool:
        return self._change_one(SET_LEASE, (duration, ttl, *_fenced(fence)))

    def complete(self, fence: Fence, outcome: Outcome, *, ttl: timedelta) -> bool:
        headers = json.dumps(outcome.headers)
        parameters = (ttl, outcome.status, headers, outcome.body, outcome.reference, *_fenced(fence))
        return self._change_one(COMPLETE, parameters, BOUND_IDLING)

    def release(self, fence: Fence) -> bool:
        return self._change_one(RELEASE, _fenced(fence))

    def park(self, fence: Fence) -> bool:
        return self._change_one(PARK, _fenced(fence))

    def bound_transaction(self, *, idle: timedelta, statement: timedelta | None = None) -> None:
        if self.is_nested:
            return
        bounds = [("idle_in_transaction_session_timeout", idle), ("statement_timeout", statement)]
        wanted = [(name, _milliseconds(duration)) for name, duration in bounds if duration is not None]
        with self.connection.cursor() as cursor:
            cursor.execute(
                f"SELECT {', '.join(['set_config(%s, %s, true)'] * len(wanted))}",
                [text for setting in wanted for text in setting],
            )

    @contextmanager
    def one_statement(self) -> Iterator[None]:
        if self.is_nested:
            yield
            return
        driver = self.connection.connection
        driver.autocommit = True
        try:
            yield
        finally:
            # Not if the connection is broken, or interrupted within its statement: Django then rolls back or closes.
            if driver.pgconn.transaction_status == TRANSACTION_IDLE:
                driver.autocommit = False

    @contextmanager
    def watch_transaction(self) -> Iterator[TransactionWatch]:
        connection = self.connection
        watch = TransactionWatch(partial(_is_open, connection), partial(_identity, connection))
        with connection.execute_wrapper(watch):
            yield watch

    def lost_a_race(self, error: BaseException) -> bool:
        return _sqlstate(error) in {"40001", "40P01"}  # serialization failure, deadlock

    def timed_out_waiting(self, error: BaseException) -> bool:
        return _sqlstate(error) == "55P03"  # lock not available

    def was_broken_before(self, error: BaseException) -> bool:
        return _sqlstate(error) == "25P02"  # in failed SQL transaction

    def commit_was_refused(self, error: BaseException) -> bool:
        # The server answered, and it answers a COMMIT that failed with any class: a deferred constraint (23), a
        # serialization failure (40), whatever a deferred trigger raises. A connection that broke has no SQLSTATE.
        sqlstate = _sqlstate(error)
        return bool(sqlstate) and not sqlstate.startswith(UNDECIDED_CLASSES)

    def is_permanent(self, error: BaseException) -> bool:
        # Syntax error or access rule violation (a missing table or column, a missing permission), feature not
        # supported, data exception; and a column that must not be null and that this code doesn't know of.
        return _sqlstate(error)[:2] in {"42", "0A", "22"} or _sqlstate(error) == "23502"

    def is_duplicate(self, error: BaseException) -> bool:
        return False  # ON CONFLICT answers without an error

    def _change_one(self, update: str, parameters: tuple[Any, ...], settings: str = "") -> bool:
        connection = self.connection
        if not connection.savepoint_ids:
            # A statement that is a transaction of its own has no time to idle in.
            of_update = BOUND_WAITING if connection.connection.autocommit else f"{BOUND_WAITING} || {BOUND_IDLING}"
            update = _with_settings(update, settings or of_update)
        with connection.cursor() as cursor:
            cursor.execute(update, parameters)
            return bool(cursor.rowcount == 1)


def _is_open(connection: BaseDatabaseWrapper) -> bool:
    """Whether the server knows of an open transaction. A connection that is closed has nothing to tell."""
    driver = connection.connection
    return driver is None or driver.pgconn.transaction_status != TRANSACTION_IDLE


def _identity(connection: BaseDatabaseWrapper) -> object:
    """When the open transaction began, which is another moment for another one. None of a failed one can be asked.

    The driver is asked, because Django's cursor would lead back to the watch.
    """
    driver = connection.connection
    if driver is None or driver.pgconn.transaction_status != TRANSACTION_SOUND:
        return None
    return driver.execute("SELECT now()").fetchone()


def _outcome(status: int, headers: str | None, body: str | None, reference: str | None) -> Outcome:
    return Outcome.stored(status, json.loads(headers or "null"), body, reference)


def _milliseconds(duration: timedelta) -> str:
    return f"{max(1, int(duration.total_seconds() * 1000))}ms"  # 0 would switch the bound off


def _parts(scope: Scope) -> tuple[str, str, str]:
    return (scope.account_id, scope.operation, scope.idempotency_key)


def _observed(scope: Scope, row: Row) -> tuple[Any, ...]:
    return (*_parts(scope), row.id, row.attempt, row.request_hash)


def _fenced(fence: Fence) -> tuple[Any, ...]:
    return (*_parts(fence.scope), fence.id, fence.attempt, fence.request_hash)


def _sqlstate(error: BaseException) -> str:
    """The five characters with which the server named the error; empty where it named none."""
    return getattr(error.__cause__, "sqlstate", None) or ""
