"""Messages of several statements, so that BEGIN and COMMIT cost no round trips.

BEGIN travels with the handler's first statement, and COMMIT with the completing update. Each pair is one simple query
message: the server reads it as a whole before it runs anything, and skips the rest after an error. A pipeline would
save the same round trips, but the server would run the update before it has read the COMMIT. A process that freezes
between the two would hold the record's lock in a session that looks busy, which no idle timeout would end.
"""

from __future__ import annotations

import re
import select
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from django.db import Error

from ... import foreign
from ..transaction_guard import TransactionWatch

#: libpq's transaction states: none open, open, and open but failed.
TRANSACTION_IDLE, TRANSACTION_SOUND, TRANSACTION_FAILED = 0, 2, 3


def has_open_transaction(driver: Any) -> bool:
    """Whether the server last reported an open transaction. False if the session is lost."""
    return driver.pgconn.transaction_status in {TRANSACTION_SOUND, TRANSACTION_FAILED}


def is_silent(driver: Any) -> bool:
    """Whether the server has sent no unsolicited message, such as the end of the session.

    If the session ended before COMMIT is sent, nothing was committed. Once it is sent, that would be unknown.
    """
    if not hasattr(select, "poll"):  # on Windows
        return not select.select([driver.pgconn.socket], [], [], 0)[0]
    # Not select(), which supports only the first 1,024 file descriptors.
    poll = select.poll()
    poll.register(driver.pgconn.socket, select.POLLIN)
    return not poll.poll(0)


#: Words of a text that may replace its transaction, after which the server reports an open one as before.
_ENDS = re.compile(r"\b(?:commit|rollback|abort|end|prepare)\b")
_BEGINS = re.compile(r"\b(?:begin|start)\b")


def may_replace_transaction(sql: str) -> bool:
    """Whether a text may end its transaction and begin another one: COMMIT AND CHAIN, or several statements.

    Names and literals may contain the words as well. Then the server is queried in vain.
    """
    text = sql.lower()
    # Each statement comes here, and the patterns take a hundred times as long.
    if "chain" in text or ";" in text:
        return _ENDS.search(text) is not None and ("chain" in text or _BEGINS.search(text) is not None)
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

    #: The id of the transaction in which a text ran that may have replaced it.
    _transaction: str | None = field(default=None, init=False)

    def __call__(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        self.look()
        if not self._begun and not many and self._can_follow_begin(sql, context["cursor"].cursor):
            result = self._begin(execute, sql, params, context["cursor"].cursor, context)
        else:
            text = str(sql)
            if not self._begun and holds_several(text):
                # Let the driver begin. If the text itself began the transaction, its end would not be noticed.
                self.connection.connection.execute("")
                self.look()
            if self._transaction is None and may_replace_transaction(text):
                self._transaction = self._identity()
            result = execute(sql, params, many, context)
        self.look()
        return result

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        super().__exit__(kind, error, traceback)
        if self._transaction is not None and self._identity() not in {self._transaction, None}:
            self.note_end()

    def look(self) -> None:
        driver = self.connection.connection
        is_open = driver is None or driver.pgconn.transaction_status != TRANSACTION_IDLE
        if self._begun and not is_open:
            self.note_end()
        self._begun = is_open

    def has_committed(self) -> bool:
        # A text of several statements may have failed after its COMMIT AND CHAIN.
        if self._transaction is not None:
            with suppress(Error), self.connection.cursor() as cursor:  # without an answer, the claim can't be released
                cursor.execute("SELECT pg_xact_status(%s::xid8)", [self._transaction])
                return bool(cursor.fetchone()[0] == "committed")
        return False

    def _identity(self) -> str | None:
        """The id of the open transaction. None if it has failed or its session is lost."""
        driver = self.connection.connection
        if driver is not None and driver.pgconn.transaction_status == TRANSACTION_SOUND:
            # Through the driver, because Django's cursor would call this watch again.
            with suppress(self.connection.Database.Error):
                return str(driver.execute("SELECT pg_current_xact_id()").fetchone()[0])
        return None

    def _begin(self, execute: Callable[..., Any], sql: str, params: Any, cursor: Any, context: Any) -> Any:
        driver, many = self.connection.connection, False
        try:
            # With autocommit on, the driver sends no BEGIN. If it stayed on, Django would declare cursors WITH HOLD.
            setattr(driver, foreign.AUTOCOMMIT, True)
            try:
                answer = execute(f"{_begin(driver)}; {sql}", params, many, context)
            finally:
                setattr(driver, foreign.AUTOCOMMIT, False)
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

    def _can_follow_begin(self, sql: object, cursor: Any) -> bool:
        driver = self.connection.connection
        return (
            # If a text of several statements fails, a COMMIT among them may have run. A single statement can't commit
            # and then fail.
            isinstance(sql, str)
            and not holds_several(sql)
            and self.takes_several(cursor)
            and foreign.is_autocommit_tested(self.connection.Database.__version__)
            and hasattr(driver, foreign.AUTOCOMMIT)
            and not driver.autocommit
            and driver.read_only is None
            and driver.deferrable is None
            # A wrapper inside this one may execute other statements while autocommit is on.
            and foreign.execute_wrappers(self.connection)[-1] is self
        )


def _begin(driver: Any) -> str:
    """The BEGIN that the driver would send."""
    if driver.isolation_level is None:
        return "BEGIN"
    return f"BEGIN ISOLATION LEVEL {driver.isolation_level.name.replace('_', ' ')}"
