"""The store of SQLite, and the store of databases that have none of their own."""

from __future__ import annotations

from django.db import OperationalError

from ..watch import TransactionWatch
from .bodies import Bodies
from .claims import Claims
from .counters import Counters
from .outbox import Outbox
from .purge import Purge


class PortableStore(Claims, Purge, Bodies, Outbox, Counters):
    """Any database, with Django's ORM."""


class SQLiteStore(PortableStore):
    """SQLite: one writer at a time. Errors are known by their text, because Python 3.10 has no codes for them."""

    has_one_writer = True

    def watch_transaction(self) -> TransactionWatch:
        return TransactionWatch(self.connection, self._is_open)

    def is_busy(self, error: BaseException) -> bool:
        return "is locked" in str(error) or super().is_busy(error)

    def is_permanent(self, error: BaseException) -> bool:
        text = str(error)
        schema = text.startswith("no such ") or "has no column named" in text
        return schema if isinstance(error, OperationalError) else text.startswith("NOT NULL constraint failed")

    def is_duplicate(self, error: BaseException) -> bool:
        return str(error).startswith("UNIQUE constraint failed")

    def _is_open(self) -> bool:
        connection = self.connection.connection
        return connection is None or connection.in_transaction
