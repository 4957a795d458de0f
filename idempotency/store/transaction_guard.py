"""Detects code that ends its transaction by a COMMIT or ROLLBACK that bypasses Django, or leaves one open."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any, Self

from django.db import connections
from django.db.transaction import Atomic

from .. import foreign

#: The state that code must leave as it found it, by database: the open ``atomic()`` blocks, and whether autocommit was
#: switched off outside of them. A database that is absent has neither.
OpenTransactions = dict[str, tuple[list[Atomic], bool]]


def open_transactions() -> OpenTransactions:
    """The transaction state of this thread's connections."""
    return {
        connection.alias: (
            [*foreign.atomic_blocks(connection)],
            connection.connection is not None
            and not foreign.in_atomic_block(connection)
            and connection.autocommit != connection.settings_dict["AUTOCOMMIT"],
        )
        for connection in connections.all(initialized_only=True)
    }


def undo_left_open(before: OpenTransactions, after: OpenTransactions) -> str | None:
    """Roll back what was opened since ``before`` and is still open ``after``.

    Django would mistake the end of an outer block for the end of the inner one that was left open. Then nothing would
    be committed, and the thread's next request would find an open transaction.

    :returns: the alias of a database that was left in another state, or None.
    """
    changed = None
    for using, found in after.items():
        expected = before.get(using, ([], False))  # the connection may be new
        if found == expected:
            continue
        changed, connection = using, connections[using]
        for block in reversed(found[0][len(expected[0]) :]):
            block.__exit__(RuntimeError, RuntimeError(), None)
        if not foreign.in_atomic_block(connection):
            connection.close()  # with autocommit off, it has an open transaction
    return changed


def is_refusal_to_nest(error: BaseException) -> bool:
    """Whether an ``atomic()`` block raised the error instead of nesting: a durable one, or one that retries."""
    if not isinstance(error, RuntimeError):
        return False
    *_, (frame, _) = walk_tb(error.__traceback__)
    return frame.f_code.co_name == "__enter__" and isinstance(frame.f_locals.get("self"), Atomic)


@dataclass(eq=False, repr=False)
class TransactionWatch:
    """Checks around each statement in its block that the driver still has the same transaction open.

    Django assumes that an ``atomic()`` block is one transaction. If a handler executes COMMIT or ROLLBACK itself, its
    writes and its outcome are no longer committed together. Subclasses do the checks. This class itself is for drivers
    that can't report the transaction.
    """

    connection: Any
    """Django's connection with the open transaction."""

    is_outermost: bool = field(default=False, init=False)
    """Whether to run outside of the wrappers that are installed already, rather than within them."""

    ended: bool = field(default=False, init=False)
    """Whether something may have been committed separately."""

    _begun: bool = field(default=False, init=False)

    def __enter__(self) -> Self:
        self.look()
        wrappers = foreign.execute_wrappers(self.connection)
        wrappers.insert(0 if self.is_outermost else len(wrappers), self)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        foreign.execute_wrappers(self.connection).remove(self)  # not the last one, which may be the operation's
        self.look()

    def __call__(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        return execute(sql, params, many, context)

    def look(self) -> None:
        """Note whether the transaction is still open. A driver opens it at the block's first statement."""

    def note_end(self) -> None:
        self.ended = True

    def has_committed(self) -> bool:
        """Whether the block committed something before its last transaction, which an error has rolled back."""
        return False


@dataclass(eq=False, repr=False)
class SQLiteWatch(TransactionWatch):
    """SQLite may roll back a transaction when one of its statements fails."""

    _is_undone: bool = field(default=False, init=False)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        foreign.execute_wrappers(self.connection).remove(self)
        # If the block ends with that error, nothing was committed. Otherwise it continued in autocommit.
        if error is None or not self._is_undone:
            self.look()

    def __call__(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        self.look()
        try:
            result = execute(sql, params, many, context)
        except BaseException:
            driver = self.connection.connection
            with suppress(self.connection.Database.Error):  # the connection is closed
                self._is_undone = driver is not None and not driver.in_transaction
            raise
        self.look()
        return result

    def look(self) -> None:
        driver = self.connection.connection
        try:
            is_open = driver is None or driver.in_transaction
        except self.connection.Database.Error:
            is_open = True
        if self._begun and not is_open:
            self.note_end()
        self._begun = is_open
