"""The statements for claims. One statement claims, and a claim that does not win writes nothing.

A second statement reads the winner's record. If the insert also read it (in a CTE), a replay would save a round trip,
but every first execution would cost the planning of both; ``docs/explanation/benchmarks.md`` has the figures.

Every time here is ``statement_timestamp()``. ``now()`` stands still during a transaction, and the completing update may
be the end of a long one. Settings are local to the transaction (``set_config(..., true)``), because a pooler in
transaction mode gives the session to another client right after it.
"""

from __future__ import annotations

import json
from datetime import timedelta
from functools import cache, partial
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ...identity.scope import Scope
from ...lifecycle import Status
from ...outcome import Outcome
from ..store import UNDECIDED_CLASSES, Fence, Row, status_of
from ..watch import TransactionWatch
from .citus import Citus, Setting

#: How long a claim waits for another transaction's lock on its record. A record is locked until a COMMIT only, unless
#: the holder of the lock is frozen. Then "in progress" is a better answer for the caller than a longer wait.
WAITING = Setting("lock_timeout", "1000ms")
#: If a process freezes between its statement and its COMMIT, the server ends its session after this time. Until then it
#: holds the record's lock.
IDLING = Setting("idle_in_transaction_session_timeout", "5000ms")
NO_DISK = Setting("synchronous_commit", "off")

#: libpq's PQTRANS_IDLE: no transaction is open.
TRANSACTION_IDLE = 0
#: libpq's PQTRANS_INTRANS: a transaction is open, and no statement of it has failed.
TRANSACTION_SOUND = 2

# Settings travel in a statement that is sent anyway, because a SET LOCAL of its own would be one more round trip on
# every request. set_config() returns the value that it has set, so the comparison is always true.
BOUND_WAITING, BOUND_IDLING, WITHOUT_DISK = (
    f"set_config('{name}', '{value}', true)" for name, value in (WAITING, IDLING, NO_DISK)
)

# A claim is a transaction of its own, which can't be idle. A CASE costs less than a SELECT in a WHERE clause, so both
# statements of every first execution have one.
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
INSERT_BARE_CLAIM = INSERT_CLAIM.format(settings="'none'")  # in a TestCase, and on Citus

# The server compares the times, because it takes longer to read timestamps into Python.
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

# The status is compared as an expression, so that the planner can't use the partial index of unfinished records. With
# that index it would read every claim in progress to find one record, and under SERIALIZABLE each of these reads is a
# conflict with another request.
FENCED = f"""{OBSERVED} AND status || '' = 'in_progress'"""

# The retention begins when an owner or an outcome is written.
KEEP = "greatest(expires_at, statement_timestamp() + %s)"

# The update checks status and lease again under the row's lock, so a claim that was renewed, completed or released
# since it was read stays as it is.
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
    response_status = NULL, response_headers = NULL, response_body = NULL, response_reference = NULL,
    error = NULL, body_expires_at = NULL
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

# The next four updates do not check the lease, because an attempt that is late but was not taken over still owns its
# record.
#
# The completing update is the last statement of the business transaction. After it, only this process can delay the
# COMMIT, if it freezes before sending it. The update's one setting bounds that. The update has no lock timeout there,
# because that would also apply to COMMIT, which checks deferred foreign keys and may wait for rows that the handler
# needs. As a transaction of its own, it waits as long as every other update.
COMPLETE = f"""
UPDATE idempotency_record
SET status = 'completed', completed_at = statement_timestamp(), lease_expires_at = NULL, expires_at = {KEEP},
    response_status = %s, response_headers = %s::jsonb, response_body = %s::json, response_reference = %s
{FENCED}
"""
COMPLETE_BEFORE_COMMIT = COMPLETE.replace("'completed'", f"CASE WHEN {BOUND_IDLING} <> '' THEN 'completed' END")
# An operation without body_ttl doesn't name the column.
COMPLETE_WITH_BODY_TTL, COMPLETE_WITH_BODY_TTL_BEFORE_COMMIT = (
    update.replace("SET status", "SET body_expires_at = statement_timestamp() + %s, status")
    for update in (COMPLETE, COMPLETE_BEFORE_COMMIT)
)

RELEASE = f"""
UPDATE idempotency_record
SET status = 'recoverable', lease_expires_at = NULL, error = coalesce(%s, error)
{FENCED}
"""

SET_LEASE = f"""
UPDATE idempotency_record
SET lease_expires_at = statement_timestamp() + %s, expires_at = {KEEP}
{FENCED}
"""

PARK = f"""
UPDATE idempotency_record
SET status = 'parked', lease_expires_at = NULL, error = coalesce(%s, error)
{FENCED}
"""


@cache
def _with_settings(update: str, settings: str) -> str:
    """Add settings for its transaction to an update. Each update above ends with a condition.

    The server computes a SELECT in a condition before it waits for the row's lock.
    """
    return f"{update} AND (SELECT {settings}) <> ''"


class Claims(Citus):
    """Claims, the transactions around them, and what the server's errors mean."""

    def insert_claim(
        self, scope: Scope, request_hash: str, *, lease: timedelta, ttl: timedelta, wait_for_disk: bool
    ) -> int | None:
        parameters: tuple[Any, ...] = (*_parts(scope), request_hash, lease, ttl)
        with self.connection.cursor() as cursor:
            if self.is_nested:
                cursor.execute(INSERT_BARE_CLAIM, parameters)
            elif self.has_citus:
                settings = [*self._bounds(), *([] if wait_for_disk else [NO_DISK])]
                self.execute_on_citus(cursor, INSERT_BARE_CLAIM, parameters, *settings)
            else:
                cursor.execute(INSERT_DURABLE_CLAIM if wait_for_disk else INSERT_FAST_CLAIM, parameters)
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
            status=status_of(status),
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

    def complete(self, fence: Fence, outcome: Outcome, *, ttl: timedelta, body_ttl: timedelta | None = None) -> bool:
        headers = json.dumps(outcome.headers)
        parameters = (ttl, outcome.status, headers, outcome.body, outcome.reference, *_fenced(fence))
        complete, before_commit = COMPLETE, COMPLETE_BEFORE_COMMIT
        if body_ttl is not None:
            complete, before_commit = COMPLETE_WITH_BODY_TTL, COMPLETE_WITH_BODY_TTL_BEFORE_COMMIT
            parameters = (body_ttl, *parameters)
        if self.is_nested or self._is_alone:
            return self._change_one(complete, parameters)
        if self.has_citus:
            return self._matches_one(complete, parameters, IDLING)
        return self._matches_one(before_commit, parameters)

    def release(self, fence: Fence, error: str | None = None) -> bool:
        return self._change_one(RELEASE, (error, *_fenced(fence)))

    def park(self, fence: Fence, error: str | None = None) -> bool:
        return self._change_one(PARK, (error, *_fenced(fence)))

    def bound_transaction(
        self,
        *,
        idle: timedelta,
        statement: timedelta | None = None,
        lock: timedelta | None = None,
        wait_for_disk: bool = True,
    ) -> None:
        if self.is_nested:
            return
        bounds = {"idle_in_transaction_session_timeout": idle, "statement_timeout": statement, "lock_timeout": lock}
        wanted = [(name, _milliseconds(duration)) for name, duration in bounds.items() if duration is not None]
        wanted += [] if wait_for_disk else [("synchronous_commit", "off")]
        with self.connection.cursor() as cursor:
            cursor.execute(
                f"SELECT {', '.join(['set_config(%s, %s, true)'] * len(wanted))}",
                [text for setting in wanted for text in setting],
            )

    def commit_at_once(self) -> None:
        if not self.is_nested:
            # Django's block has nothing to commit then, and sets autocommit again when it ends, whatever ends it.
            self.connection.connection.autocommit = True
            # The settings for the workers are a message of their own then, and that has to be in the same transaction.
            self.connection.connection.autocommit = self.sends_settings_along or not self.has_citus

    def watch_transaction(self) -> TransactionWatch:
        connection = self.connection
        return TransactionWatch(connection, partial(_is_open, connection), partial(_identity, connection))

    def lost_a_race(self, error: BaseException) -> bool:
        return _sqlstate(error) in {"40001", "40P01"}  # serialization failure, deadlock

    def timed_out_waiting(self, error: BaseException) -> bool:
        return _sqlstate(error) == "55P03"  # lock not available

    def was_broken_before(self, error: BaseException) -> bool:
        return _sqlstate(error) == "25P02"  # in failed SQL transaction

    def commit_was_refused(self, error: BaseException) -> bool:
        # An SQLSTATE says that the server has answered. A failed COMMIT may have any class: a deferred constraint (23),
        # a serialization failure (40), or what a deferred trigger raises. A broken connection gives no SQLSTATE.
        sqlstate = _sqlstate(error)
        return bool(sqlstate) and not sqlstate.startswith(UNDECIDED_CLASSES)

    def is_permanent(self, error: BaseException) -> bool:
        # Class 42 is a syntax error or access rule violation (a missing table, column or permission), 0A an unsupported
        # feature, 22 a data exception. 23502 is a NOT NULL column that this code doesn't know.
        return _sqlstate(error)[:2] in {"42", "0A", "22"} or _sqlstate(error) == "23502"

    def is_duplicate(self, error: BaseException) -> bool:
        return False  # ON CONFLICT answers without an error

    @property
    def _is_alone(self) -> bool:
        """Whether the next statement is a transaction of its own, which can't be idle."""
        return bool(self.connection.connection.autocommit)

    def _bounds(self) -> list[Setting]:
        return [WAITING] if self._is_alone else [WAITING, IDLING]

    def _change_one(self, update: str, parameters: tuple[Any, ...]) -> bool:
        if self.is_nested:
            return self._matches_one(update, parameters)
        if self.has_citus:
            return self._matches_one(update, parameters, *self._bounds())
        settings = BOUND_WAITING if self._is_alone else f"{BOUND_WAITING} || {BOUND_IDLING}"
        return self._matches_one(_with_settings(update, settings), parameters)

    def _matches_one(self, update: str, parameters: tuple[Any, ...], *for_citus: Setting) -> bool:
        with self.connection.cursor() as cursor:
            if for_citus:
                self.execute_on_citus(cursor, update, parameters, *for_citus)
            else:
                cursor.execute(update, parameters)
            return bool(cursor.rowcount == 1)


def _is_open(connection: BaseDatabaseWrapper) -> bool:
    """Whether the server has an open transaction. A closed connection can't tell, and counts as open."""
    driver = connection.connection
    return driver is None or driver.pgconn.transaction_status != TRANSACTION_IDLE


def _identity(connection: BaseDatabaseWrapper) -> object:
    """When the open transaction began, which identifies it. None if it has failed and can't be asked.

    This asks the driver, because Django's cursor would call the watch again.
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
    """The five characters of the server's error code, or an empty text if there is none."""
    return getattr(error.__cause__, "sqlstate", None) or ""
