"""Messages of several statements, so that BEGIN and COMMIT cost no round trips.

BEGIN travels with the handler's first statement, and COMMIT with the completing update. Each pair is one simple query
message: the server reads it as a whole before it runs anything, and skips the rest after an error. A pipeline would
save the same round trips, but the server would run the update before it has read the COMMIT. A process that freezes
between the two would hold the record's lock in a session that looks busy, which no idle timeout would end.
"""

from __future__ import annotations

import re
import selectors
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from django.db import Error
from django.utils.version import get_version_tuple

from ..transaction_guard import GAP, TransactionWatch

#: Polls one socket with one system call. Windows has no poll().
Selector: Any = getattr(selectors, "PollSelector", selectors.SelectSelector)

#: The psycopg releases whose private ``_autocommit`` is known to work as ``PostgreSQLWatch`` expects: from the first,
#: before the second. With any other release, the driver sends BEGIN as a separate message.
TESTED: Final = ("3.2", "3.4")

#: libpq's transaction states: none open, open, and open but failed.
TRANSACTION_IDLE, TRANSACTION_SOUND, TRANSACTION_FAILED = 0, 2, 3


@cache
def is_tested(version: str) -> bool:
    """Whether a psycopg release is in the range ``TESTED``."""
    first, end = (get_version_tuple(limit) for limit in TESTED)
    return first <= get_version_tuple(version) < end


def has_open_transaction(driver: Any) -> bool:
    """Whether the server last reported an open transaction. False if the session is lost."""
    return driver.pgconn.transaction_status in {TRANSACTION_SOUND, TRANSACTION_FAILED}


def is_silent(driver: Any) -> bool:
    """Whether the server has sent no unsolicited message, such as the end of the session.

    If the session ended before COMMIT is sent, nothing was committed. Once it is sent, that would be unknown.
    """
    with Selector() as selector:
        selector.register(driver.pgconn.socket, selectors.EVENT_READ)
        return not selector.select(0)


#: Statements that may end a transaction and begin another one at once: COMMIT AND CHAIN, or several statements in one
#: text. ROLLBACK TO only returns to a savepoint. END is also part of CASE, so it counts only at the start of a
#: statement.
_ENDS = re.compile(rf"\b(?:commit|abort|rollback(?!\s+(?:work\s+|transaction\s+)?to\b))\b|(?:^|;){GAP}*end\b")

#: A return to a savepoint, recognised as a whole because its comments may contain any word. It must not be mistaken for
#: an end: a failed transaction has no identity, so the one after it would look like another transaction.
_RETURNS = re.compile(
    rf'{GAP}*rollback{GAP}+(?:(?:work|transaction){GAP}+)?to{GAP}+(?:savepoint{GAP}+)?(?:"[^"]*"|\w+){GAP}*;?{GAP}*'
)


def may_end_transaction(sql: str) -> bool:
    # Search for the words first, because the pattern takes a hundred times as long and every statement comes here.
    text = sql.lower()
    if "commit" in text or "rollback" in text or "abort" in text or "end" in text:
        return _ENDS.search(text) is not None and _RETURNS.fullmatch(text) is None
    return False


def holds_several(sql: str) -> bool:
    """Whether a text may hold several statements."""
    return ";" in sql.rstrip().rstrip(";")


@dataclass(eq=False, repr=False)
class PostgreSQLWatch(TransactionWatch):
    """Also sends BEGIN together with its block's first statement, and detects COMMIT AND CHAIN.

    Only statements through Django's cursor wrapper reach this watch. For COPY, ``stream()`` and ``callproc()``, and for
    a statement that can't be part of a longer message, the driver sends BEGIN.
    """

    #: Whether a message from a driver's cursor can hold several statements.
    takes_several: Callable[[Any], bool]

    def __call__(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        self.look()
        if not self._begun:
            result = self._begin(execute, sql, params, many, context)
        elif not may_end_transaction(str(sql)):
            result = execute(sql, params, many, context)
        else:
            result = self._execute_watched(execute, sql, params, many, context)
        self.look()
        return result

    def look(self) -> None:
        driver = self.connection.connection
        is_open = driver is None or driver.pgconn.transaction_status != TRANSACTION_IDLE
        if self._begun and not is_open:
            self.note_end()
        self._begun = is_open

    def identity(self) -> object:
        """When the open transaction began, which identifies it. None if it has failed and can't be queried."""
        driver = self.connection.connection
        if driver is None or driver.pgconn.transaction_status != TRANSACTION_SOUND:
            return None
        return self._send(driver, "SELECT now()").fetchone()

    def _send(self, driver: Any, statement: str) -> Any:
        # Through the driver, because Django's cursor would call this watch again.
        with self.connection.wrap_database_errors:
            return driver.execute(statement)

    def _execute_watched(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        before = self.identity()  # only here, because that costs two round trips
        try:
            result = execute(sql, params, many, context)
        except Error:
            if holds_several(str(sql)):
                self.note_end()  # one of the statements before the failed one may have been a COMMIT AND CHAIN
            raise
        if self.identity() != before:
            self.note_end()
        return result

    def _begin(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        driver, cursor = self.connection.connection, context["cursor"].cursor
        if many or not self._can_follow_begin(sql, driver, cursor):
            if holds_several(str(sql)) and may_end_transaction(str(sql)):
                # Let the driver begin. If the text itself began the transaction, its end would not be noticed.
                self._send(driver, "SELECT")
                return self._execute_watched(execute, sql, params, many, context)
            return execute(sql, params, many, context)
        try:
            # With autocommit on, the driver sends no BEGIN. Its public setter refuses to switch autocommit off inside a
            # transaction. If it stayed on, Django would declare cursors WITH HOLD.
            driver._autocommit = True
            try:
                answer = execute(f"{_begin(driver)}; {sql}", params, many, context)
            finally:
                driver._autocommit = False
        except Error:  # any other error, for example from a signal handler, must not be lost
            if driver.pgconn.transaction_status != TRANSACTION_IDLE:
                raise
        else:
            if cursor.nextset():  # skip the result of BEGIN
                return answer
        # Either the server refused the whole text, for example for a syntax error, and nothing ran. Run by the driver,
        # the statement leaves the transaction open and failed, as Django expects, and the error gives the right
        # position. Or the statement is empty, because only an empty one has no result.
        return execute(sql, params, many, context)

    def _can_follow_begin(self, sql: object, driver: Any, cursor: Any) -> bool:
        return (
            # If a text of several statements fails, a COMMIT among them may have run. A single statement can't commit
            # and then fail.
            isinstance(sql, str)
            and not holds_several(sql)
            and self.takes_several(cursor)
            and is_tested(self.connection.Database.__version__)
            and not driver.autocommit
            and driver.read_only is None
            and driver.deferrable is None
            # A wrapper inside this one may execute other statements while autocommit is on.
            and self.connection.execute_wrappers[-1] is self
        )


def _begin(driver: Any) -> str:
    """The BEGIN that the driver would send."""
    if driver.isolation_level is None:
        return "BEGIN"
    return f"BEGIN ISOLATION LEVEL {driver.isolation_level.name.replace('_', ' ')}"
