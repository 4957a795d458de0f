"""Messages of several statements, so that BEGIN and COMMIT cost no round trips.

BEGIN travels with the first statement of the handler, and COMMIT with the completing update. Each is one simple query
message: the server reads it as a whole before it runs anything, and skips the rest after an error. A pipeline would
save the same round trips, but the server would run the update before it has read the COMMIT. A process that freezes
between the two would hold the record's lock in a session that looks busy, so no limit on idle sessions would end it.
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

from ..transaction_guard import TransactionWatch

#: Asks about one socket by one system call. Windows has no poll().
Selector: Any = getattr(selectors, "PollSelector", selectors.SelectSelector)

#: The releases of psycopg whose private ``_autocommit`` is known to be what ``PostgreSQLWatch`` takes it for: from the
#: first, before the second. With any other release, the driver sends its own BEGIN as a message.
TESTED: Final = ("3.2", "3.4")

#: The states of libpq: no transaction is open, none of its statements has failed, one has.
TRANSACTION_IDLE, TRANSACTION_SOUND, TRANSACTION_FAILED = 0, 2, 3


@cache
def is_tested(version: str) -> bool:
    """Whether a release of psycopg is one of ``TESTED``."""
    first, end = (get_version_tuple(limit) for limit in TESTED)
    return first <= get_version_tuple(version) < end


def has_open_transaction(driver: Any) -> bool:
    """Whether the server has said last that a transaction is open. False if the session is lost."""
    return driver.pgconn.transaction_status in {TRANSACTION_SOUND, TRANSACTION_FAILED}


def is_silent(driver: Any) -> bool:
    """Whether the server has said nothing unasked, such as that it has ended the session.

    If a session has ended before COMMIT is sent, nothing was committed. Afterwards that would be unknown.
    """
    with Selector() as selector:
        selector.register(driver.pgconn.socket, selectors.EVENT_READ)
        return not selector.select(0)


#: Statements that may end a transaction and begin another one at once: COMMIT AND CHAIN, or several statements in one
#: text. ROLLBACK TO only goes back to a savepoint. END is also a part of CASE, so it counts only at the beginning of a
#: statement.
_ENDS = re.compile(r"\b(?:commit|abort|rollback(?!\s+(?:work\s+|transaction\s+)?to\b))\b|(?:^|;)\s*end\b")


def may_end_transaction(sql: str) -> bool:
    # Search for the words first, because the pattern takes a hundred times as long, and every statement is checked
    # here.
    text = sql.lower()
    if "commit" in text or "rollback" in text or "abort" in text or "end" in text:
        return _ENDS.search(text) is not None
    return False


@dataclass(eq=False, repr=False)
class PostgreSQLWatch(TransactionWatch):
    """Also sends BEGIN together with the first statement of its block, and detects COMMIT AND CHAIN.

    Only Django's wrapper around a cursor comes here. COPY, ``stream()`` and ``callproc()`` don't, and they get the
    BEGIN of the driver, as does each statement that can't be a part of a longer message.
    """

    #: Whether a message of a driver's cursor can hold several statements.
    takes_several: Callable[[Any], bool]

    def __call__(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        self.look()
        if not self._begun:
            result = self._begin(execute, sql, params, many, context)
        elif not may_end_transaction(str(sql)):
            result = execute(sql, params, many, context)
        else:
            before = self.identity()  # only here, because that costs two round trips
            result = execute(sql, params, many, context)
            if self.identity() != before:
                self.note_end()
        self.look()
        return result

    def look(self) -> None:
        driver = self.connection.connection
        is_open = driver is None or driver.pgconn.transaction_status != TRANSACTION_IDLE
        if self._begun and not is_open:
            self.note_end()
        self._begun = is_open

    def identity(self) -> object:
        """When the open transaction began, which identifies it. None if it has failed and can't be asked.

        This asks the driver, because Django's cursor would call the watch again.
        """
        driver = self.connection.connection
        if driver is None or driver.pgconn.transaction_status != TRANSACTION_SOUND:
            return None
        with self.connection.wrap_database_errors:
            return driver.execute("SELECT now()").fetchone()

    def _begin(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        driver, cursor = self.connection.connection, context["cursor"].cursor
        if many or not self._can_follow_begin(sql, driver, cursor):
            return execute(sql, params, many, context)
        try:
            # With autocommit on, the driver sends no BEGIN of its own. Its public setter refuses to switch it off again
            # inside of a transaction. If it stayed on, Django would declare cursors WITH HOLD.
            driver._autocommit = True
            try:
                answer = execute(f"{_begin(driver)}; {sql}", params, many, context)
            finally:
                driver._autocommit = False
        except Error:  # another error, such as that of a signal's handler, is not to be lost
            if driver.pgconn.transaction_status != TRANSACTION_IDLE:
                raise
        else:
            if cursor.nextset():  # from the result of BEGIN to that of the statement
                return answer
        # Either the text was refused as a whole, such as for a syntax error, and nothing of it ran. The driver's way
        # leaves the transaction open and failed, as Django expects it, and the error names the place in the statement.
        # Or the statement is empty, because only that has no result.
        return execute(sql, params, many, context)

    def _can_follow_begin(self, sql: object, driver: Any, cursor: Any) -> bool:
        return (
            # If a text of several statements fails, a COMMIT among them may have run. One statement can't commit and
            # then fail.
            isinstance(sql, str)
            and ";" not in sql.rstrip().rstrip(";")
            and self.takes_several(cursor)
            and is_tested(self.connection.Database.__version__)
            and not driver.autocommit
            and driver.read_only is None
            and driver.deferrable is None
            # A wrapper inside of this one may execute other statements while autocommit is on.
            and self.connection.execute_wrappers[-1] is self
        )


def _begin(driver: Any) -> str:
    """The BEGIN that the driver would send."""
    if driver.isolation_level is None:
        return "BEGIN"
    return f"BEGIN ISOLATION LEVEL {driver.isolation_level.name.replace('_', ' ')}"
