"""Every statement that depends on the kind of database, behind two interfaces: ``Store`` and ``Upkeep``.

A ``Store`` changes one record, for claims. An ``Upkeep`` changes many, and knows the tables. ``portable.py`` and
``upkeep.py`` define them with Django's ORM, for SQLite and other databases. ``postgresql`` has SQL statements, which
``postgresql/citus.py`` adapts to Citus. ``mysql.py`` overrides what differs on MariaDB and MySQL.

To add a database, write a subclass of ``Store`` and, where it does better, of ``Upkeep``, and add them to
``portable.STORES`` and ``upkeep.UPKEEPS``. Request handling never branches on the database vendor; only checks and the
admin do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from django.db import OperationalError, connections, router, transaction

from ..foreign import in_atomic_block
from ..models import IdempotencyRecord
from .portable import BY_ITS_CLOCK, Store, from_now, status_of, store_for
from .rows import CommitError, Fence, Row, newer_record
from .transaction_guard import OpenTransactions, is_refusal_to_nest, open_transactions, undo_left_open
from .upkeep import PurgedRows, Replication, TableSize, Upkeep, by_ids, upkeep_for

__all__ = [
    "BY_ITS_CLOCK",
    "CommitError",
    "Fence",
    "OpenTransactions",
    "PurgedRows",
    "Replication",
    "Row",
    "Store",
    "TableSize",
    "Upkeep",
    "by_ids",
    "from_now",
    "is_refusal_to_nest",
    "is_transaction_open",
    "newer_record",
    "open_transactions",
    "records_database",
    "retry_lost_races",
    "status_of",
    "store_for",
    "undo_left_open",
    "upkeep_for",
]

_Result = TypeVar("_Result")


def records_database(**hints: str) -> str:
    """The database that holds the records. Reads use it, too, because a replica may lag behind.

    :param hints: passed to the router: ``operation`` and ``account_id``, where known.
    """
    return router.db_for_write(IdempotencyRecord, **hints)


def is_transaction_open(using: str) -> bool:
    """Whether the caller has a transaction open. The one that TestCase wraps around a test does not count."""
    if not in_atomic_block(connections[using]):
        return False
    try:
        with transaction.atomic(using=using, durable=True):
            return False
    except RuntimeError:
        return True


def retry_lost_races(rounds: int, using: str, transact: Callable[[], _Result]) -> _Result:
    """Return the result of ``transact``, and call it up to ``rounds`` times if its transaction loses races."""
    while True:
        try:
            return transact()
        except OperationalError as error:
            rounds -= 1
            if not rounds or not store_for(using).lost_a_race(error):
                raise
