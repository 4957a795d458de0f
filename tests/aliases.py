"""Other connections to the tests' database: a second entry in ``DATABASES``, other options, a pool."""

import threading
from contextlib import closing, contextmanager, nullcontext
from urllib.parse import parse_qs, urlsplit

import pytest
from django.db import connection, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import override_settings

from tests.providers import eventually


class _Router:
    """Keeps the records of operations named ``alias.…`` in the database ``alias``."""

    def db_for_write(self, model, **hints):
        alias = str(hints.get("operation")).partition(".")[0]
        return alias if alias in connections.settings else None


def _ensure_connection(connection):
    if connection.connection is None:
        with connection.wrap_database_errors:
            connection.connect()


@contextmanager
def added(monkeypatch, alias, settings):
    """Add this entry to ``DATABASES`` in the block."""
    connections.settings[alias] = settings
    # Django lets a test connect only to the databases that it has set up, and it hasn't set up this one.
    monkeypatch.setattr(BaseDatabaseWrapper, "ensure_connection", _ensure_connection)
    try:
        yield
    finally:
        # When a thread ends, it closes only its connections to aliases that still exist.
        renewer = f"idempotency-renewer-{alias}"
        assert eventually(lambda: renewer not in {thread.name for thread in threading.enumerate()})
        connections[alias].close()
        del connections[alias]
        del connections.settings[alias]


@contextmanager
def another_alias(monkeypatch, alias, url):
    """Connect to the tests' database as ``alias`` at the host of ``url``, ignoring the url's database and options."""
    parts = urlsplit(url)
    host = parts.hostname or parse_qs(parts.query).get("host", [""])[0]  # an SQLite file has no host
    place = {"HOST": host, "PORT": parts.port or "", "USER": parts.username or ""}
    settings = {**connections.settings["default"], **place, "CONN_MAX_AGE": None}
    # Without the project's protection from a silent server, so that tests exercise the package's.
    settings["CONN_HEALTH_CHECKS"] = False
    settings["OPTIONS"] = {name: value for name, value in settings["OPTIONS"].items() if name != "connect_timeout"}
    with added(monkeypatch, alias, settings), override_settings(DATABASE_ROUTERS=[_Router()]):
        yield


@contextmanager
def reconnected(**options):
    """In the block, this thread's connections have these options in addition to the settings' options."""
    connection.close()
    with pytest.MonkeyPatch.context() as patched, closing(connection):
        for name, value in options.items():
            patched.setitem(connection.settings_dict["OPTIONS"], name, value)
        # Django reads this option once.
        patched.setitem(vars(connection.features), "uses_server_side_binding", bool(options.get("server_side_binding")))
        yield


def at_level(level):
    """In the block, this thread's PostgreSQL connections have this isolation level."""
    if connection.vendor != "postgresql":
        return nullcontext()
    from psycopg import IsolationLevel

    return reconnected(isolation_level=IsolationLevel[level])


@contextmanager
def pool_of_one(**options):
    """In the block, all threads of the process share one pooled session, one after the other."""
    pytest.importorskip("psycopg_pool", reason="psycopg is installed without its pool")
    mine = connections["default"]
    pooled = mine.copy()
    pooled.settings_dict["CONN_MAX_AGE"] = 0
    pooled.settings_dict["OPTIONS"]["pool"] = {"min_size": 0, "max_size": 1, **options}
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(connections.settings, "default", pooled.settings_dict)  # used by other threads
        connections["default"] = pooled
        try:
            yield pooled
        finally:
            pooled.close()
            pooled.close_pool()
            connections["default"] = mine
