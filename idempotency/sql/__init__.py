"""Every statement that depends on the kind of database, behind one interface: ``Store``.

``store.py`` defines the interface. ``postgresql`` implements it in SQL. ``portable`` implements it with Django's ORM,
for SQLite and other databases. Both have one file per subject: claims, purge, outbox, counters. ``mysql`` is what
MariaDB and MySQL do differently.

To add a database, write a subclass of ``PortableStore``, override what the database does better, and add it to
``_STORES``. Code outside of this folder never asks for a database's vendor.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TypeVar

from django.db import OperationalError, connections

from .store import DeletedBatch, DueRange, Fence, Part, Replication, Row, Store, TableSize, newer_record, status_of

__all__ = [
    "DeletedBatch",
    "DueRange",
    "Fence",
    "Part",
    "Replication",
    "Row",
    "Store",
    "TableSize",
    "newer_record",
    "retry_lost_races",
    "status_of",
    "store",
]

_Result = TypeVar("_Result")

#: The store of each vendor: its module in this folder, and its name. Other vendors get the portable store.
_STORES = {
    "postgresql": ("postgresql", "PostgreSQLStore"),
    "sqlite": ("portable", "SQLiteStore"),
    "mysql": ("mysql", "MySQLStore"),
}
_PORTABLE = ("portable", "PortableStore")


#: The attribute in which each of Django's connections keeps its store.
_KEPT = "_idempotency_store"


def store(using: str) -> Store:
    """The store of the database alias ``using``, over this thread's connection."""
    connection = connections[using]
    kept: Store | None = vars(connection).get(_KEPT)
    if kept is None:
        # Imported at its first use, because it needs the models, and Django imports an app's package before its models.
        module, name = _STORES.get(connection.vendor, _PORTABLE)
        kept = getattr(import_module(f".{module}", __name__), name)(connection)
        setattr(connection, _KEPT, kept)
    return kept


def retry_lost_races(rounds: int, using: str, transact: Callable[[], _Result]) -> _Result:
    """Call ``transact`` and return its result. If its transaction loses a race, try again, up to ``rounds`` times."""
    while True:
        try:
            return transact()
        except OperationalError as error:
            rounds -= 1
            if not rounds or not store(using).lost_a_race(error):
                raise
