"""Detects that code ends its own transaction by a COMMIT or ROLLBACK that bypasses Django, or leaves one open."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from django.db import connections
from django.db.transaction import Atomic

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


#: What code must leave as it has found it, for each database: the open ``atomic()`` blocks, and whether autocommit was
#: switched off outside of them. What is not here has neither.
Standing = dict[str, tuple[list[Atomic], bool]]


def standing() -> Standing:
    """How the transactions of this thread stand on the databases to which it has a connection."""
    return {
        connection.alias: (
            [*connection.atomic_blocks],
            connection.connection is not None
            and not connection.in_atomic_block
            and connection.autocommit != connection.settings_dict["AUTOCOMMIT"],
        )
        for connection in connections.all(initialized_only=True)
    }


def undo_left_open(before: Standing, after: Standing) -> str | None:
    """Roll back what was opened since ``before`` and is still open ``after``.

    Django would take the end of an outer block for the end of the inner one that was left open. Then nothing is
    committed, and the thread's next request finds an open transaction.

    :returns: the alias of a database that was not left as it was found, or None.
    """
    changed = None
    for using, found in after.items():
        expected = before.get(using, ([], False))  # the connection may be new
        if found == expected:
            continue
        changed, connection = using, connections[using]
        for block in reversed(found[0][len(expected[0]) :]):
            block.__exit__(RuntimeError, RuntimeError(), None)
        if not connection.in_atomic_block:
            connection.close()  # with autocommit off, it has an open transaction
    return changed


@dataclass(eq=False, repr=False)
class TransactionWatch:
    """In its block, checks around each statement that the driver still has the same transaction open.

    Django assumes that its ``atomic()`` block is one transaction. If a handler executes COMMIT or ROLLBACK itself, the
    handler's writes and its outcome are not committed together any more.
    """

    connection: Any
    """Django's connection with the open transaction."""

    is_open: Callable[[Any], object]
    """Says whether the driver's connection has an open transaction: something true if it has. Drivers open it at the
    block's first statement."""

    identity: Callable[[], object] = lambda: None
    """Identifies the open transaction, for a database that can end one and begin the next in one statement."""

    may_end: Callable[[str], bool] = may_end_transaction
    """Whether a statement may end the transaction, so that the identity must be compared."""

    error_may_undo: bool = False
    """Whether the database may roll back the transaction when one of its statements fails."""

    ends_before_error: bool = False
    """Whether a statement that may end the transaction has done so even if it fails."""

    ended: bool = field(default=False, init=False)
    """Whether something may have been committed on its own."""

    _begun: bool = field(default=False, init=False)
    _is_undone: bool = field(default=False, init=False)

    def __enter__(self) -> Self:
        self.look()
        self.connection.execute_wrappers.append(self)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.connection.execute_wrappers.remove(self)  # not the last one, which may be the operation's
        if error is None or not self._is_undone:  # before its error, the block may have sent COMMIT by the driver
            self.look()

    def __call__(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        self.look()
        # Ask for the identity only if the statement may change it, because that costs two round trips.
        doubtful = self._begun and self.may_end(str(sql))
        before = self.identity() if doubtful else None
        try:
            result = self.execute(execute, sql, params, many, context)
        except BaseException:
            # If the block ends now, nothing was committed. If it continues, its next statement may be, by itself.
            self.ended = self.ended or (doubtful and self.ends_before_error)
            driver = self.connection.connection
            with suppress(self.connection.Database.Error):  # it is closed, and can't tell
                self._is_undone = self.error_may_undo and driver is not None and not self.is_open(driver)
            raise
        self.look()
        if doubtful and self._begun:
            self.ended = self.ended or self.identity() != before
        return result

    def execute(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        """Execute one statement. A database may send what opens the transaction along with it."""
        return execute(sql, params, many, context)

    def look(self) -> None:
        driver = self.connection.connection
        try:
            is_open = driver is None or bool(self.is_open(driver))
        except self.connection.Database.Error:
            is_open = True  # a closed connection can't tell
        self.ended = self.ended or (self._begun and not is_open)
        self._begun = is_open
