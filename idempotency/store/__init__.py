"""Every statement that depends on the kind of database, behind one interface: ``Store``.

``portable.py`` defines it, with Django's ORM, for SQLite and other databases. ``postgresql`` has other statements,
which ``postgresql/citus.py`` adapts to Citus. ``mysql.py`` changes what differs on MariaDB and MySQL.

To add a database, write a subclass of ``Store``, override what the database does better, and add it to
``portable.STORES``. A request never asks for a database's vendor; checks and the admin do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from django.db import OperationalError, connections, router, transaction

from ..models import IdempotencyRecord
from .base import CommitError, Fence, Replication, Row, TableSize, Taken, newer_record
from .portable import Store, from_now, status_of, store_for
from .transaction_guard import standing, undo_left_open

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
    "records_database",
    "retry_lost_races",
    "standing",
    "status_of",
    "store_for",
    "undo_left_open",
]

_Result = TypeVar("_Result")


def records_database(**hints: str) -> str:
    """The database that records are written to and read from. A replica may lag behind, so it is never used.

    :param hints: for a router: ``operation`` and ``account_id``, where they are known.
    """
    return router.db_for_write(IdempotencyRecord, **hints)


def is_transaction_open(using: str) -> bool:
    """Whether the calling code has a transaction open, other than the one that TestCase wraps a test in."""
    if not connections[using].in_atomic_block:
        return False
    try:
        with transaction.atomic(using=using, durable=True):
            return False
    except RuntimeError:
        return True


def retry_lost_races(rounds: int, using: str, transact: Callable[[], _Result]) -> _Result:
    """The result of ``transact``, which is called up to ``rounds`` times if its transaction loses races."""
    while True:
        try:
            return transact()
        except OperationalError as error:
            rounds -= 1
            if not rounds or not store_for(using).lost_a_race(error):
                raise
