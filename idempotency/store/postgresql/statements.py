"""The statements for claims. One statement claims, and a claim that does not win writes nothing.

A second statement reads the winner's record with the same cursor. An insert that also reads it would save replays a
round trip, but every first execution would pay for planning both. So one statement does both only where the connection
prepares statements.

Every time here is ``statement_timestamp()``. ``now()`` is constant during a transaction, and the completing update may
end a long one.

``{settings}`` is replaced by transaction settings: how long statements wait, and what COMMIT waits for. They are local
to the transaction (``set_config(..., true)``), because a pooler in transaction mode hands the session to another client
right after it.
"""

from __future__ import annotations

import json
from datetime import timedelta
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

from ...identity.scope import Scope
from ...lifecycle import Status
from ...outcome import Outcome
from ..history import APPENDED, entry
from ..portable import Store, status_of
from ..rows import CommitError, Fence, Row
from ..transaction_guard import TransactionWatch
from .merged import TRANSACTION_IDLE, PostgreSQLWatch, has_open_transaction, is_silent


class Setting(NamedTuple):
    """A transaction-local setting."""

    name: str
    value: str


#: How long a claim waits for another transaction's lock on its record. A record is locked only until a COMMIT, unless
#: the lock's holder is frozen. Then "in progress" is a better answer for the caller than a longer wait.
WAITING = Setting("lock_timeout", "1000ms")
#: If a process freezes between its statement and its COMMIT, the server ends its session, and so its lock on the
#: record, after this time.
IDLING = Setting("idle_in_transaction_session_timeout", "5000ms")
NO_DISK = Setting("synchronous_commit", "off")


@cache
def with_settings(statement: str, settings: tuple[Setting, ...]) -> str:
    # set_config() returns the value that it sets, so the comparison is always true. It costs less in a CASE than as a
    # SELECT in the WHERE clause.
    made = " || ".join(f"set_config('{name}', '{value}', true)" for name, value in settings)
    return statement.format(settings=f"{made} <> ''" if made else "true")


# The session's process id, if it is the one that the driver received when it connected. A pooler makes one up, and may
# run the handler in another session.
SESSION = "CASE WHEN pg_backend_pid() = %s THEN pg_backend_pid() END"

INSERT_CLAIM = f"""
INSERT INTO idempotency_record
    (account_id, operation, idempotency_key, request_hash, status, attempt, lease_expires_at, expires_at, session)
VALUES (%s, %s, %s, %s, CASE WHEN {{settings}} THEN 'in_progress' END, 1,
    statement_timestamp() + %s::interval, statement_timestamp() + %s::interval, {SESSION})
ON CONFLICT (account_id, operation, idempotency_key) DO NOTHING
RETURNING id
"""

# The server compares the times, because parsing timestamps in Python takes longer.
READ = """
SELECT id, attempt, status, request_hash,
    date_part('epoch', lease_expires_at - statement_timestamp()), session, expires_at <= statement_timestamp(),
    response_status, response_headers::text, response_body::text, response_reference
FROM idempotency_record
WHERE account_id = %s AND operation = %s AND idempotency_key = %s
"""

# The SELECT sees the table as it was before the insert, so exactly one part returns a row, with two exceptions. If a
# conflicting record was committed meanwhile, neither does. If the record was deleted meanwhile, both do, and the claim
# counts.
CLAIM_OR_READ = f"""
WITH claimed AS ({INSERT_CLAIM})
SELECT id, NULL AS attempt, NULL AS status, NULL AS request_hash, NULL AS lease_left, NULL AS session,
    NULL AS retention_over, NULL AS response_status, NULL AS response_headers, NULL AS response_body,
    NULL AS response_reference
FROM claimed
UNION ALL {READ}
ORDER BY attempt NULLS FIRST
LIMIT 1
"""

OBSERVED = """
WHERE account_id = %s AND operation = %s AND idempotency_key = %s AND id = %s AND attempt = %s AND request_hash = %s
"""

# The status is compared as an expression, so that the planner can't use the partial index of unfinished records. With
# that index it would read every claim in progress to find one record, and under SERIALIZABLE each of these reads
# conflicts with another request.
FENCED = f"""{OBSERVED} AND status || '' = 'in_progress'"""

# The retention starts again when an owner or an outcome is written.
KEEP = "greatest(expires_at, statement_timestamp() + %s::interval)"

HISTORY = "history = " + APPENDED["postgresql"].format(history="history", entry="%s", now="statement_timestamp()")

ABANDONED = "(status || '' = 'in_progress' AND lease_expires_at <= statement_timestamp())"

# The next two updates check status and lease again under the row lock, so they leave alone a claim that was renewed,
# completed or parked since it was read.
TAKE_OVER = f"""
UPDATE idempotency_record
SET status = CASE WHEN {{settings}} THEN 'in_progress' END, attempt = attempt + 1,
    lease_expires_at = statement_timestamp() + %s::interval, expires_at = {KEEP}, session = {SESSION},
    {HISTORY}
{OBSERVED}
AND (status || '' = 'recoverable' OR {ABANDONED})
"""

START_OVER = f"""
UPDATE idempotency_record
SET status = CASE WHEN {{settings}} THEN 'in_progress' END, attempt = attempt + 1, request_hash = %s,
    lease_expires_at = statement_timestamp() + %s::interval,
    expires_at = statement_timestamp() + %s::interval, session = {SESSION},
    created_at = statement_timestamp(), completed_at = NULL,
    response_status = NULL, response_headers = NULL, response_body = NULL, response_reference = NULL,
    error = NULL, body_expires_at = NULL,
    {HISTORY}
{OBSERVED}
AND expires_at <= statement_timestamp()
AND (status || '' IN ('completed', 'recoverable') OR {ABANDONED})
"""

# The end of a session ends the lease of its claim, because the handler's transaction has ended with it: the server
# removes a session from its list after the COMMIT or ROLLBACK. If it were the wrong session, only a run would be
# wasted: as after any lease, the fence lets one attempt commit.
#
# - The process dies before the claim is committed: there is no record. After that: the session ends when the server has
#   finished its statement and finds the connection closed. After COMMIT: the record is completed.
# - The session ends while the process lives (terminated, a timeout, a restart, a failover, a handler that closes its
#   connection): the attempt has lost its transaction and can't complete.
# - The session looks alive if the process is frozen, a pool in the process has handed it on, or another session has got
#   its process id. Then the lease decides.
# - A prepared transaction outlives its session. A handler must not PREPARE its transaction, just as it must not COMMIT
#   it.
#
# The list shows each session to every role, even with track_activities off. A transaction reads the list once, so a
# later claim may name a session that is missing from it. The attempt in the fence excludes such a claim.
END_LEASE = f"""
UPDATE idempotency_record
SET lease_expires_at = CASE WHEN {{settings}} THEN statement_timestamp() END, {HISTORY}
{FENCED}
AND lease_expires_at > statement_timestamp()
AND session IS NOT NULL AND NOT EXISTS (SELECT FROM pg_stat_get_activity(session))
"""

PARK_ABANDONED = f"""
UPDATE idempotency_record
SET status = CASE WHEN {{settings}} THEN 'parked' END, lease_expires_at = NULL, {HISTORY}
{FENCED}
AND lease_expires_at <= statement_timestamp()
"""

# The next four updates don't check the lease, because an attempt that is late but was not taken over still owns its
# record.
COMPLETE = f"""
UPDATE idempotency_record
SET status = CASE WHEN {{settings}} THEN 'completed' END, completed_at = statement_timestamp(), lease_expires_at = NULL,
    expires_at = {KEEP},
    response_status = %s, response_headers = %s::jsonb, response_body = %s::json, response_reference = %s,
    body_expires_at = statement_timestamp() + %s::interval
{FENCED}
"""

#: A server may report these SQLSTATE classes for a COMMIT that succeeded: connection exception, operator intervention
#: (a shutdown), system error, internal error.
UNDECIDED_CLASSES = ("08", "57P", "58", "XX")

#: The error in the server's log if another attempt owns the record.
FENCE_MISSED = "idempotency: another attempt owns this record"

# The SELECT fails if the update matched no row, so that the server skips the COMMIT. It checks for a note that the
# update leaves. RETURNING writes the note, because it is evaluated only for a row that has changed. SET is evaluated
# before the wait for the row lock, so it would write the note even if the row no longer matches. The note is the
# record's id, because a constant could already be a setting of the role. The text that is cast to integer is not a
# constant either, because the planner would evaluate the cast.
#
# WITH completed AS (UPDATE ... RETURNING 1) SELECT 1 / count(*) FROM completed would need no note. In 6,000 pairs on
# PostgreSQL the same message took 1.13 times as long and 1.20 times the server's CPU, 50 microseconds more of each.
COMPLETE_AND_COMMIT = f"""
{with_settings(COMPLETE, ())} RETURNING set_config('idempotency.completed', id::text, true);
SELECT (CASE current_setting('idempotency.completed', true) WHEN %s THEN '1' ELSE '{FENCE_MISSED}' END)::integer;
COMMIT
"""

RELEASE = f"""
UPDATE idempotency_record
SET status = CASE WHEN {{settings}} THEN 'recoverable' END, lease_expires_at = NULL, error = coalesce(%s, error),
    {HISTORY}
{FENCED}
"""

SET_LEASE = f"""
UPDATE idempotency_record
SET lease_expires_at = CASE WHEN {{settings}} THEN statement_timestamp() + %s::interval END, expires_at = {KEEP}
{FENCED}
"""

# The lease also starts again, because a retry that missed the old session may have ended it.
LEAVE_SESSION = SET_LEASE.replace("SET ", "SET session = NULL, ", 1)

PARK = f"""
UPDATE idempotency_record
SET status = CASE WHEN {{settings}} THEN 'parked' END, lease_expires_at = NULL, error = coalesce(%s, error),
    {HISTORY}
{FENCED}
"""


class PostgreSQLStore(Store):
    """PostgreSQL. Each change is one statement."""

    @property
    def has_open_transaction(self) -> bool:
        driver: Any = self.connection.connection
        return bool(driver.pgconn.transaction_status != TRANSACTION_IDLE)

    def insert_claim(
        self, scope: Scope, request_hash: str, *, lease: timedelta, retention: timedelta, undone_by_crash: bool
    ) -> int | Row | None:
        settings = (*self._bounds(), NO_DISK) if undone_by_crash else self._bounds()
        with self.connection.cursor() as cursor:  # which may have reconnected
            session = self._session(undone_by_crash)
            parameters = (*_parts(scope), request_hash, _interval(lease), _interval(retention), session)
            if self._prepares(cursor.cursor):
                self._execute(cursor, CLAIM_OR_READ, (*parameters, *_parts(scope)), *settings)
                found = cursor.fetchone()
            else:
                self._execute(cursor, INSERT_CLAIM, parameters, *settings)
                found = cursor.fetchone()
                if found is None:
                    cursor.execute(READ, _parts(scope))
                    found = cursor.fetchone()
        if found is None:
            return None
        return int(found[0]) if len(found) == 1 or found[1] is None else _row(scope, found)

    def read(self, scope: Scope) -> Row | None:
        found = self.row_of(READ, _parts(scope))
        return None if found is None else _row(scope, found)

    def take_over(self, observed: Fence, *, lease: timedelta, retention: timedelta, undone_by_crash: bool) -> bool:
        owner = (_interval(lease), _interval(retention), self._session(undone_by_crash))
        return self._change(TAKE_OVER, *owner, entry("taken_over", observed.attempt + 1), *_matching(observed))

    def start_over(
        self, observed: Fence, request_hash: str, *, lease: timedelta, retention: timedelta, undone_by_crash: bool
    ) -> bool:
        owner = (request_hash, _interval(lease), _interval(retention), self._session(undone_by_crash))
        return self._change(START_OVER, *owner, entry("started_over", observed.attempt + 1), *_matching(observed))

    def end_lease_of_gone_session(self, observed: Fence) -> bool:
        return self._change(END_LEASE, entry("session_over", observed.attempt), *_matching(observed))

    def park_abandoned(self, observed: Fence) -> bool:
        return self._change(PARK_ABANDONED, entry("lease_over", observed.attempt), *_matching(observed))

    def set_lease(self, fence: Fence, duration: timedelta, *, retention: timedelta) -> bool:
        return self._change(SET_LEASE, _interval(duration), _interval(retention), *_matching(fence))

    def leave_session(self, fence: Fence, lease: timedelta, *, retention: timedelta) -> bool:
        return self._change(LEAVE_SESSION, _interval(lease), _interval(retention), *_matching(fence))

    def complete(self, fence: Fence, outcome: Outcome, *, retention: timedelta, commit: bool = False) -> bool:
        driver = self.connection.connection
        response = (outcome.status, json.dumps(outcome.headers), outcome.body, outcome.reference)
        body_retention = None if outcome.body_retention is None else _interval(outcome.body_retention)
        parameters = (_interval(retention), *response, body_retention, *_matching(fence))
        with self.connection.cursor() as cursor:
            if not commit or self.is_nested or not self.takes_several(cursor.cursor) or not is_silent(driver):
                # After this update only a freeze of this process can delay the COMMIT, and IDLING bounds that. WAITING
                # would also apply to COMMIT, which checks deferred foreign keys and may wait for rows that the handler
                # needs.
                self._execute(cursor, COMPLETE, parameters, WAITING if driver.autocommit else IDLING)
                return bool(cursor.rowcount == 1)
            try:
                cursor.execute(COMPLETE_AND_COMMIT, (*parameters, str(fence.id)))
            except Exception as error:
                if not has_open_transaction(driver):
                    raise CommitError(error) from None
                # The COMMIT was not reached. A deferred trigger may raise the same text, but it runs in COMMIT.
                if FENCE_MISSED in _message_of(error):
                    return False
                raise
            return True

    def release(self, fence: Fence, error: str | None = None) -> bool:
        return self._change(RELEASE, error, entry("released", fence.attempt, error), *_matching(fence))

    def park(self, fence: Fence, error: str | None = None) -> bool:
        return self._change(PARK, error, entry("parked", fence.attempt, error), *_matching(fence))

    def watch_transaction(self) -> TransactionWatch:
        return PostgreSQLWatch(self.connection, self.takes_several)

    def takes_several(self, cursor: Any) -> bool:
        """Whether a message from the driver's cursor can hold several statements. It can't with server-side binding or
        in a pipeline."""
        connection: Any = self.connection
        return isinstance(cursor, connection.Database.ClientCursor) and not connection.connection.pgconn.pipeline_status

    def _prepares(self, cursor: Any) -> bool:
        """Whether the driver prepares statements that this cursor executes repeatedly."""
        connection: Any = self.connection
        return (
            not isinstance(cursor, connection.Database.ClientCursor)
            and connection.connection.prepare_threshold is not None
        )

    def lost_a_race(self, error: BaseException) -> bool:
        return _sqlstate(error) in {"40001", "40P01"}  # serialization failure, deadlock

    def timed_out_waiting(self, error: BaseException) -> bool:
        return _sqlstate(error) == "55P03"  # lock not available

    def was_broken_before(self, error: BaseException) -> bool:
        return _sqlstate(error) == "25P02"  # in failed SQL transaction

    def was_refused_in_transaction(self, error: BaseException) -> bool:
        return _sqlstate(error) == "25001"  # active SQL transaction

    def was_read_only(self, error: BaseException) -> bool:
        return _sqlstate(error) == "25006"  # read-only SQL transaction

    def commit_was_refused(self, error: BaseException) -> bool:
        # An SQLSTATE means that the server has answered. A failed COMMIT may have any class: a deferred constraint
        # (23), a serialization failure (40), or the error of a deferred trigger. A broken connection has no SQLSTATE.
        sqlstate = _sqlstate(error)
        return bool(sqlstate) and not sqlstate.startswith(UNDECIDED_CLASSES)

    def is_permanent(self, error: BaseException) -> bool:
        # Class 42 is a syntax error or access rule violation (a missing table, column or permission), 0A an unsupported
        # feature, 22 a data exception. 23502 is a NOT NULL column that this release doesn't fill.
        return _sqlstate(error)[:2] in {"42", "0A", "22"} or _sqlstate(error) == "23502"

    def is_duplicate(self, error: BaseException) -> bool:
        return False  # ON CONFLICT reports no error

    @property
    def session(self) -> int | None:
        driver: Any = self.connection.connection
        return None if driver is None or self.is_nested else int(driver.pgconn.backend_pid)

    def _session(self, undone_by_crash: bool) -> int | None:
        """The parameter of ``SESSION``, for a claim whose handler runs in this connection's transaction."""
        return self.session if undone_by_crash else None

    def _execute(self, cursor: Any, statement: str, parameters: Any, *settings: Setting) -> None:
        """Execute a statement that contains ``{settings}``. In a TestCase the settings would outlive the savepoint."""
        cursor.execute(with_settings(statement, () if self.is_nested else settings), parameters)

    def _bounds(self) -> tuple[Setting, ...]:
        """The settings for a short transaction. In autocommit it is never idle."""
        return (WAITING,) if self.connection.autocommit else (WAITING, IDLING)

    def _change(self, update: str, *parameters: Any) -> bool:
        with self.connection.cursor() as cursor:
            self._execute(cursor, update, parameters, *self._bounds())
            return bool(cursor.rowcount == 1)


def _row(scope: Scope, found: tuple[Any, ...]) -> Row:
    pk, attempt, status, request_hash, lease_left, session, retention_over, code, headers, body, reference = found
    return Row(
        fence=Fence(scope, pk, attempt, request_hash),
        status=status_of(status),
        lease_left=lease_left or 0.0,
        session=session,
        retention_over=retention_over,
        outcome=Outcome.stored(code, json.loads(headers or "null"), body, reference)
        if status == Status.COMPLETED
        else None,
    )


@lru_cache
def _interval(duration: timedelta) -> str:
    """A duration as a parameter. A timedelta would cost the driver and the server more time."""
    return f"{duration.total_seconds():f} seconds"


#: The parameters that find a scope, and the parameters of ``OBSERVED``, which find the record that a fence names.
_parts = attrgetter("account_id", "operation", "idempotency_key")
_matching = attrgetter("scope.account_id", "scope.operation", "scope.idempotency_key", "id", "attempt", "request_hash")


def _message_of(error: BaseException) -> str:
    """The server's primary message, without details and position."""
    return getattr(getattr(error.__cause__, "diag", None), "message_primary", None) or ""


def _sqlstate(error: BaseException) -> str:
    """The five characters of the server's error code, or an empty text if there is none."""
    return getattr(error.__cause__, "sqlstate", None) or ""
