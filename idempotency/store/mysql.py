"""The store for MariaDB and MySQL: the portable statements with bounded waits, and the meaning of InnoDB's errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from django.db import Error, ProgrammingError
from django.db.models import Q, QuerySet

from ..models import IdempotencyRecord
from .portable import Store
from .rows import Row
from .transaction_guard import TransactionWatch
from .upkeep import Upkeep, by_ids

_Found = TypeVar("_Found")

# Error numbers of the server.
DUPLICATE_KEY = 1062
LOCK_WAIT_TIMEOUT = 1205
#: A deadlock, or since MariaDB 11.6 a row that has changed since the REPEATABLE READ snapshot.
LOST_RACES = frozenset({1213, 1020})
#: A savepoint that does not exist, or no longer.
NO_SAVEPOINT = 1305
TRANSACTION_IN_PROGRESS = 1568
READ_ONLY_TRANSACTION = 1792
#: An unknown column, or a column without a default that this release doesn't fill.
WRONG_COLUMNS = frozenset({1054, 1364})

#: How long a change of a record waits for another transaction's lock, in seconds. Every transaction that locks a record
#: is short, unless its process is frozen.
LOCK_TIMEOUT = 1

#: White space or a comment, which a project may add to every statement.
_GAP = r"(?:\s|/\*(?:(?!\*/)[\s\S])*\*/)"

#: Almost all statements: those that can't end the transaction.
_PLAIN = re.compile(
    rf"{_GAP}*\(*(?:select|insert|update|delete|replace|with|savepoint|release|rollback{_GAP}+(?:work{_GAP}+)?to)\b"
    r"[^;]*;?\s*",
    re.IGNORECASE,
)

#: A savepoint that no handler uses.
_SAVEPOINT = "idempotency_watch"


@dataclass(eq=False, repr=False)
class MySQLWatch(TransactionWatch):
    """Sets a savepoint before a statement that may end the transaction, and looks afterwards whether it exists.

    Stored procedures, DDL and statements of administration commit, and DDL even if it then fails. The driver doesn't
    report whether a transaction is open.
    """

    _is_set: bool = field(default=False, init=False)

    def __call__(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        self.look()
        if _PLAIN.fullmatch(str(sql)) is None:
            self._send("SAVEPOINT")
            self._is_set = True
        try:
            return execute(sql, params, many, context)
        except Error as error:
            if _number(error) in LOST_RACES:  # the server has rolled the transaction back
                self._is_set = False
            raise

    def look(self) -> None:
        # Not right after the statement, because the handler has to read its results first.
        if self._is_set:
            self._is_set = False
            try:
                self._send("RELEASE SAVEPOINT")
            except Error as error:
                if _number(error) == NO_SAVEPOINT:
                    self.note_end()

    def _send(self, verb: str) -> None:
        # Through the driver, because Django's cursor would call this watch again.
        with self.connection.wrap_database_errors, self.connection.connection.cursor() as cursor:
            cursor.execute(f"{verb} {_SAVEPOINT}")


class MySQLStore(Store):
    """MariaDB, and MySQL where it behaves the same."""

    def insert_claim(self, *claim: Any, **durations: Any) -> int | Row | None:
        with self.bounded_wait():
            return super().insert_claim(*claim, **durations)

    def _change_one(self, rows: QuerySet[IdempotencyRecord], **changes: Any) -> bool:
        with self.bounded_wait():
            return super()._change_one(rows, **changes)

    def bounded_wait(self) -> AbstractContextManager[Any]:
        """Bound how long a statement in the block waits for a lock. Has no effect on MySQL, which can't do that."""
        connection: Any = self.connection
        return connection.execute_wrapper(_wait_for_a_bounded_time) if connection.mysql_is_mariadb else nullcontext()

    @contextmanager
    def own_statement(self, what: object) -> Iterator[None]:
        with self.own_transaction(what):
            # Otherwise a process that freezes between its statement and its COMMIT would keep the record locked,
            # because by default the server has no limit for idle transactions.
            if not self.is_nested:
                with self.connection.wrap_database_errors:
                    self.connection.connection.autocommit(True)
            yield

    def watch_transaction(self) -> TransactionWatch:
        return MySQLWatch(self.connection)

    def lost_a_race(self, error: BaseException) -> bool:
        return _number(error) in LOST_RACES

    def timed_out_waiting(self, error: BaseException) -> bool:
        return _number(error) == LOCK_WAIT_TIMEOUT

    def was_refused_in_transaction(self, error: BaseException) -> bool:
        return _number(error) == TRANSACTION_IN_PROGRESS

    def was_read_only(self, error: BaseException) -> bool:
        return _number(error) == READ_ONLY_TRANSACTION

    def commit_was_refused(self, error: BaseException) -> bool:
        # InnoDB itself never refuses a COMMIT. A cluster reports a deadlock if another node has changed the same rows.
        return self.lost_a_race(error)

    def is_permanent(self, error: BaseException) -> bool:
        return isinstance(error, ProgrammingError) or _number(error) in WRONG_COLUMNS

    def is_duplicate(self, error: BaseException) -> bool:
        return _number(error) == DUPLICATE_KEY


class MySQLUpkeep(Upkeep):
    """MariaDB, and MySQL where it behaves the same."""

    def identity(self) -> tuple[Any, ...]:
        return tuple(self.store.row_of("SELECT @@hostname, @@port, DATABASE()"))

    def select_unlocked(
        self,
        rows: QuerySet[Any, _Found],
        limit: int | None = None,
        *,
        condition: Q = Q(),  # noqa: B008 - it is never changed
    ) -> list[_Found]:
        # InnoDB locks every index row that a locking SELECT reads, even one that its conditions exclude, so two
        # concurrent ones would skip rows that neither changes. A SELECT by id alone reads only the rows to lock. Under
        # a snapshot older than the locks, the last SELECT would return outdated rows.
        connection: Any = self.connection
        if connection.isolation_level != "read committed":
            return super().select_unlocked(rows, limit, condition=condition)
        all_rows = rows.model._base_manager.using(rows.db)
        select_unlocked = super().select_unlocked

        def lock(found: list[tuple[Any, ...]]) -> list[_Found]:
            by_id = all_rows.filter(pk__in=[pk for (pk,) in found])
            return list(rows.filter(by_ids(select_unlocked(by_id.values_list("pk", flat=True)), condition)))

        return self.lock_found(rows.filter(condition), limit, ["pk"], lock)


def _wait_for_a_bounded_time(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
    return execute(f"SET STATEMENT innodb_lock_wait_timeout = {LOCK_TIMEOUT} FOR {sql}", params, many, context)


def _number(error: BaseException) -> int | None:
    number = next(iter(error.args), None)
    return number if isinstance(number, int) else None
