"""Notice a transaction that is ended from within, by a COMMIT or ROLLBACK that goes past Django."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

#: What may end a transaction and begin another in one statement: COMMIT AND CHAIN, or several statements in one text.
#: ROLLBACK TO leads to a savepoint. END stands in every CASE too, so it counts only where a statement begins.
_ENDS = re.compile(r"\b(?:commit|abort|rollback(?!\s+(?:work\s+|transaction\s+)?to\b))\b|(?:^|;)\s*end\b")
_WORDS = ("commit", "abort", "rollback", "end")


def may_end_transaction(sql: str) -> bool:
    # The words are looked for first, because the pattern takes a hundred times as long and every statement comes here.
    text = sql.lower()
    return any(word in text for word in _WORDS) and _ENDS.search(text) is not None


class TransactionWatch:
    """An execute wrapper of Django's connections that compares what the driver says with what must be.

    Django believes that its ``atomic()`` block is one transaction until the block ends. A handler that executes COMMIT
    or ROLLBACK itself makes it two, or none, and what it writes then is not tied to the outcome any more.

    :param is_open: whether the driver knows of an open transaction. Drivers open it with the block's first statement.
    :param identity: of the open transaction, for a database that can end one and begin the next in one statement.
    """

    def __init__(self, is_open: Callable[[], bool], identity: Callable[[], object] = lambda: None) -> None:
        self._is_open = is_open
        self._identity = identity
        self._begun = is_open()
        #: Whether something may have been committed on its own.
        self.ended = False

    def __call__(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        self.look()
        # Asked for only where the text says that it may change, because it costs two round trips.
        doubtful = self._begun and may_end_transaction(str(sql))
        before = self._identity() if doubtful else None
        result = execute(sql, params, many, context)
        # Not where the statement failed: a database may undo the whole transaction then, and nothing is committed.
        self.look()
        if doubtful and self._begun:
            self.ended = self.ended or self._identity() != before
        return result

    def look(self) -> None:
        is_open = self._is_open()
        self.ended = self.ended or (self._begun and not is_open)
        self._begun = is_open
