"""Every statement that depends on the kind of database, behind one interface: ``Store``.

``portable.py`` defines it, with Django's ORM, for SQLite and other databases. ``postgresql`` has statements of its own,
and ``postgresql/citus.py`` changes the rest for Citus. ``mysql.py`` changes what differs on MariaDB and MySQL.

To add a database, write a subclass of ``Store``, override what the database does better, and add it to
``_STORES``. A request never asks for a database's vendor; checks and the admin do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TypeVar

from django.db import OperationalError, connections, router, transaction

from ..exceptions import OuterTransactionError
from ..models import IdempotencyRecord
from .base import CommitError, Fence, Replication, Row, TableSize, Taken, newer_record
from .portable import Store, from_now, status_of

__all__ = [
    "CommitError",
    "Fence",
    "Replication",
    "Row",
    "Store",
    "TableSize",
    "Taken",
    "from_now",
    "is_transaction_open",
    "newer_record",
    "own_transaction",
    "records_database",
    "retry_lost_races",
    "status_of",
    "store_for",
]

_Result = TypeVar("_Result")

#: What makes the store of each vendor: its module in this folder, and its name. Other vendors get the portable store.
_STORES = {
    "postgresql": ("postgresql", "choose"),
    "sqlite": ("portable", "SQLiteStore"),
    "mysql": ("mysql", "MySQLStore"),
}
_PORTABLE = ("portable", "Store")


#: The attribute in which each of Django's connections keeps its store.
_KEPT = "_idempotency_store"


def records_database(**hints: str) -> str:
    """The database that records are written to and read from. A replica may lag behind, so it is never used.

    :param hints: what a router may decide by: ``operation`` and ``account_id``, where they are known.
    """
    return router.db_for_write(IdempotencyRecord, **hints)


def store_for(using: str) -> Store:
    """The store of the database alias ``using``, over this thread's connection."""
    connection = connections[using]
    kept: Store | None = vars(connection).get(_KEPT)
    if kept is None:
        # Imported at its first use, so that a process imports the store of its own database only.
        module, name = _STORES.get(connection.vendor, _PORTABLE)
        kept = getattr(import_module(f".{module}", __name__), name)(connection)
        if not kept.is_provisional:
            setattr(connection, _KEPT, kept)
    return kept


def is_transaction_open(using: str) -> bool:
    """Whether the calling code has a transaction open, other than the one that TestCase wraps a test in."""
    if not connections[using].in_atomic_block:
        return False
    try:
        with transaction.atomic(using=using, durable=True):
            return False
    except RuntimeError:
        return True


@contextmanager
def own_transaction(store: Store, what: object, *, one_statement: bool = False) -> Iterator[None]:
    """Run the block in a transaction that is committed when the block ends.

    If the process dies before the COMMIT, nothing of the block has happened. If it dies after the COMMIT, all of it
    has.

    :param store: the store of the database, over this thread's connection.
    :param what: the subject of an error message, such as an operation.
    :param one_statement: whether the block sends one statement only. The database may then commit it by itself.
    :raises OuterTransactionError: the transaction could not be committed by itself, because another one is open or
        autocommit is off.
    """
    connection, using = store.connection, store.using
    if not connection.in_atomic_block and not connection.get_autocommit():
        raise OuterTransactionError(
            f"{what} was called with autocommit off on database {using!r}, so its claim could not be committed for "
            f"others to see. Remove AUTOCOMMIT from the database's settings, and undo every set_autocommit(False)."
        )
    opened = False
    try:
        # durable=True raises in an open transaction, except in the one that TestCase wraps a test in.
        with transaction.atomic(using=using, durable=True):
            opened = True
            if one_statement:
                store.commit_at_once()
            yield
    except RuntimeError as error:
        if opened:
            raise
        raise OuterTransactionError(
            f"{what} was called inside an open transaction of database {using!r}, in which its claim could not be "
            f"committed for others to see. Call it outside of atomic(). A protected view is exempt from "
            f"ATOMIC_REQUESTS automatically; if another decorator or an overridden as_view() hides that, mark the "
            f"outermost view with django.db.transaction.non_atomic_requests."
        ) from error


def retry_lost_races(rounds: int, using: str, transact: Callable[[], _Result]) -> _Result:
    """Call ``transact`` and return its result. If its transaction loses a race, try again, up to ``rounds`` times."""
    while True:
        try:
            return transact()
        except OperationalError as error:
            rounds -= 1
            if not rounds or not store_for(using).lost_a_race(error):
                raise
