"""PostgreSQL: each change is one statement, which on Citus goes to one worker."""

from __future__ import annotations

from typing import Any

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from .citus import CitusStore, CitusUpkeep
from .merged import TRANSACTION_IDLE
from .statements import PostgreSQLStore
from .upkeep import PostgreSQLUpkeep

__all__ = ["CitusStore", "CitusUpkeep", "PostgreSQLStore", "PostgreSQLUpkeep", "choose", "choose_upkeep"]

_HAS_CITUS = "SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'citus')"

#: Whether a database has the extension, by its address. A process queries each database once.
_has_citus: dict[tuple[str, ...], bool] = {}


def choose(connection: BaseDatabaseWrapper) -> PostgreSQLStore:
    """The store for a database, which depends on whether it has the Citus extension.

    If this query fails, the store's statements fail, too. The next call repeats the query.
    """
    place = tuple(str(connection.settings_dict[name]) for name in ("HOST", "PORT", "NAME"))
    if place not in _has_citus:
        try:
            _has_citus[place] = _query_citus(connection)
        except Error:
            store = PostgreSQLStore(connection)
            store.is_provisional = True
            return store
    return (CitusStore if _has_citus[place] else PostgreSQLStore)(connection)


def choose_upkeep(store: PostgreSQLStore) -> PostgreSQLUpkeep:
    """The upkeep for the database of a store."""
    return (CitusUpkeep if isinstance(store, CitusStore) else PostgreSQLUpkeep)(store)


def _query_citus(connection: Any) -> bool:
    """Query through the driver and not Django's cursor, so that tests that count statements don't count this one."""
    connection.ensure_connection()
    driver = connection.connection
    autocommit = driver.autocommit
    # A transaction that has sent nothing yet must not begin with this query.
    is_idle = driver.pgconn.transaction_status == TRANSACTION_IDLE
    with connection.wrap_database_errors:
        try:
            if is_idle:
                driver.autocommit = True
            ((answer,),) = driver.execute(_HAS_CITUS).fetchall()
        finally:
            if is_idle:
                driver.autocommit = autocommit
    return bool(answer)
