"""Every statement that depends on the database's make, behind one contract: ``Store``.

``store.py`` says what a store does. ``postgresql`` does it in SQL; ``portable`` does it through Django's ORM, for
SQLite and the others. Each has a file per subject: claims, purge, outbox, counters.

To add a database, write a subclass of ``PortableStore``, override what the database does better, and enter it in
``_STORES``. Nothing above this folder asks for a database's vendor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TypeVar

from django.db import OperationalError, connections

from .store import DeletedBatch, Fence, Row, Store, TableSize

__all__ = ["DeletedBatch", "Fence", "Row", "Store", "TableSize", "retry_lost_races", "store"]

_Result = TypeVar("_Result")

#: The store of each vendor, as the module in this folder and the name in it. Others get the portable one.
_STORES = {"postgresql": ("postgresql", "PostgreSQLStore"), "sqlite": ("portable", "SQLiteStore")}
_PORTABLE = ("portable", "PortableStore")


def store(using: str) -> Store:
    """The store of the database alias ``using``."""
    return _store(using, connections[using].vendor)


@cache
def _store(using: str, vendor: str) -> Store:
    # Imported when it is asked for, because it needs the models, and the app's package is imported before they can be.
    module, name = _STORES.get(vendor, _PORTABLE)
    made: Store = getattr(import_module(f".{module}", __name__), name)(using)
    return made


def retry_lost_races(rounds: int, using: str, transact: Callable[[], _Result]) -> _Result:
    """What ``transact`` returns. It is called again if its transaction lost a race, ``rounds`` times in all at most."""
    while True:
        try:
            return transact()
        except OperationalError as error:
            rounds -= 1
            if not rounds or not store(using).lost_a_race(error):
                raise
