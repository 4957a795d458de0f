"""Notice a transaction that is ended from within, by a COMMIT or ROLLBACK that goes past Django."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class TransactionWatch:
    """An execute wrapper of Django's connections that compares what the driver says with what must be.

    Django believes that its ``atomic()`` block is one transaction until the block ends. A handler that executes COMMIT
    or ROLLBACK itself makes it two, or none, and what it writes then is not tied to the outcome any more.

    :param is_open: whether the driver knows of an open transaction. Drivers open it with the block's first statement.
    """

    def __init__(self, is_open: Callable[[], bool]) -> None:
        self._is_open = is_open
        self._begun = is_open()
        #: Whether something may have been committed on its own.
        self.ended = False

    def __call__(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        self.look()
        result = execute(sql, params, many, context)
        # Not where the statement failed: a database may undo the whole transaction then, and nothing is committed.
        self.look()
        return result

    def look(self) -> None:
        is_open = self._is_open()
        self.ended = self.ended or (self._begun and not is_open)
        self._begun = is_open
