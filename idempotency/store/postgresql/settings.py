"""Settings of one transaction: how long its statements wait, and what its COMMIT waits for.

They are local to the transaction (``set_config(..., true)``), because a pooler in transaction mode gives the session to
another client right after it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from ..portable import Store


class Setting(NamedTuple):
    """A setting of one transaction."""

    name: str
    value: str


#: How long a claim waits for another transaction's lock on its record. A record is locked until a COMMIT only, unless
#: the holder of the lock is frozen. Then "in progress" is a better answer for the caller than a longer wait.
WAITING = Setting("lock_timeout", "1000ms")
#: If a process freezes between its statement and its COMMIT, the server ends its session after this time. Until then it
#: holds the record's lock.
IDLING = Setting("idle_in_transaction_session_timeout", "5000ms")
NO_DISK = Setting("synchronous_commit", "off")


class Settings(Store):
    """Statements that bring the settings of their transaction along."""

    def _execute(self, cursor: Any, statement: str, parameters: Any, *settings: Setting) -> None:
        """Execute a statement under settings of its transaction.

        A SET LOCAL of its own would be one more round trip on every request. In a TestCase the settings would outlive
        the savepoint, so they are left out.

        :param statement: contains ``{settings}``, a condition that is always true and makes the settings. It is in what
            the statement writes, which the server computes before it waits for a row's lock.
        """
        cursor.execute(with_settings(statement, () if self.is_nested else settings), parameters)

    def _bounds(self) -> tuple[Setting, ...]:
        """The settings of a short transaction. If it is one statement, it is never idle."""
        return (WAITING,) if self._is_alone else (WAITING, IDLING)

    @property
    def _is_alone(self) -> bool:
        """Whether the next statement is a transaction of its own."""
        return bool(self.connection.connection.autocommit)


@cache
def with_settings(statement: str, settings: tuple[Setting, ...]) -> str:
    # set_config() returns the value that it has set, so the comparison is always true. A CASE with it costs less than a
    # SELECT in a WHERE clause.
    made = " || ".join(f"set_config('{name}', '{value}', true)" for name, value in settings)
    return statement.format(settings=f"{made} <> ''" if made else "true")
