"""System checks: ``manage.py check`` finds a wrong setting before the first customer does.

Each setting has one id: a wrong ``TTL`` is always E003, whatever is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from django.apps import AppConfig
from django.conf import settings as django_settings
from django.core import checks
from django.core.checks import CheckMessage, Error, Tags, register
from django.db import DEFAULT_DB_ALIAS, DatabaseError, InterfaceError, connections, transaction

from . import sql
from .conf import SETTING, problems_of
from .http.checks import declared_operations
from .protocol.transactions import alias

OLDEST_MARIADB = (10, 11)

_Answer = TypeVar("_Answer")


@register("idempotency")
def check_settings(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check each entry of ``IDEMPOTENCY``, then all entries together, then each operation under these settings."""
    problems = problems_of(getattr(django_settings, SETTING, {}))
    if not problems:  # an operation takes some of its options from the settings, so it can contradict them
        problems = [problem for operation in declared_operations() for problem in operation.problems()]
    return [Error(problem.message, hint=problem.hint, id=problem.check_id) for problem in problems]


@register("idempotency", Tags.database)
def check_databases(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """Check the settings of the database that records are written to.

    MySQL and MariaDB are connected to, and PostgreSQL if ``databases`` names it.
    """
    using = alias()
    connection: Any = connections[using]
    messages = [*_wrong_connections(using, connection), *_doubtful_connections(using, connection)]
    if not _is_tested(connection, may_ask=databases is None or using in databases):
        messages.append(
            checks.Warning(
                f"Database {using!r} is a {connection.display_name} database. This release is tested on PostgreSQL, "
                f"SQLite, and MariaDB {OLDEST_MARIADB[0]}.{OLDEST_MARIADB[1]} and later.",
                hint="Keep the records on PostgreSQL.",
                id="idempotency.W003",
            )
        )
    if databases is not None and using in databases:
        messages += [*_doubtful_durability(using), *_tables_outside_of_citus(using)]
    if using != DEFAULT_DB_ALIAS and any(operation.transaction for operation in declared_operations()):
        messages.append(
            checks.Warning(
                f"Records are kept in database {using!r}. Operations with transaction=True protect writes to that "
                f"database only.",
                hint="Keep records in the database that the protected operations write to, or declare operations that "
                "write elsewhere with transaction=False and a recovery.",
                id="idempotency.W001",
            )
        )
    return messages


def _wrong_connections(using: str, connection: Any) -> Iterator[CheckMessage]:
    """Settings and drivers with which the protocol can't keep its promises."""
    if not connection.settings_dict["AUTOCOMMIT"]:
        yield Error(
            f"Database {using!r} has AUTOCOMMIT off, so a claim could not be committed before its operation runs.",
            hint="Remove AUTOCOMMIT from the database's settings.",
            id="idempotency.E016",
        )
    if getattr(connection.Database, "__name__", "") == "psycopg2":
        yield Error(
            f"Database {using!r} is reached through psycopg2. Its errors differ from those of psycopg 3, so they would "
            f"be misread.",
            hint="Install psycopg 3 (pip install 'psycopg>=3.2'). Django uses it if both are installed.",
            id="idempotency.E020",
        )


def _doubtful_connections(using: str, connection: Any) -> Iterator[CheckMessage]:
    """Settings with which a database works less well."""
    options = connection.settings_dict.get("OPTIONS", {})
    if connection.vendor == "sqlite" and str(options.get("transaction_mode")).upper() not in {"IMMEDIATE", "EXCLUSIVE"}:
        yield checks.Warning(
            f"SQLite database {using!r} opens its transactions deferred. If a transaction reads before it writes and "
            f"another one has written meanwhile, it fails at once, whatever the timeout.",
            hint='Set OPTIONS = {"transaction_mode": "IMMEDIATE"} on the database.',
            id="idempotency.W002",
        )


def _tables_outside_of_citus(using: str) -> Iterator[CheckMessage]:
    if outside := _asked(using, lambda store: store.tables_outside_of_citus()):
        yield checks.Warning(
            f"Records are distributed by Citus, which doesn't know these tables of database {using!r}: "
            f"{', '.join(outside)}. If the coordinator crashes during a COMMIT, a record may be completed although a "
            f"write to one of these tables is lost.",
            hint="Distribute each table that a protected operation writes to, make it a reference table, or call "
            "citus_add_local_table_to_metadata() for it.",
            id="idempotency.W014",
        )


def _doubtful_durability(using: str) -> Iterator[CheckMessage]:
    """How the server may lose claims that it has confirmed. Then an operation whose effects are outside runs again."""
    outside = sorted(operation.name for operation in declared_operations() if not operation.transaction)
    found = _asked(using, lambda store: store.replication()) if outside else None
    if found is None:
        return
    names = ", ".join(outside[:3]) + (", …" if len(outside) > 3 else "")
    if found.asynchronous_standbys and not found.is_synchronous:
        yield checks.Warning(
            f"Database {using!r} has asynchronous standbys ({found.asynchronous_standbys}) and no synchronous one. If "
            f"one is promoted, claims may be missing, and operations with transaction=False run again: {names}.",
            hint="Set synchronous_standby_names on the server, for example to 'ANY 1 (a, b)'.",
            id="idempotency.W015",
        )
    has_standbys = found.is_synchronous or found.asynchronous_standbys
    if found.synchronous_commit == "off" or (found.synchronous_commit == "local" and has_standbys):
        yield checks.Warning(
            f"Database {using!r} has synchronous_commit = {found.synchronous_commit} for this role. After a crash or a "
            f"failover claims may be missing, and operations with transaction=False run again: {names}.",
            hint="Set synchronous_commit to 'on' for the role, the database or the server.",
            id="idempotency.W013",
        )


def _asked(using: str, question: Callable[[sql.Store], _Answer]) -> _Answer | None:
    """What the server answers; None if it can't be asked, which is no finding of these checks."""
    try:
        with transaction.atomic(using):
            return question(sql.store(using))
    except (DatabaseError, InterfaceError):
        return None


def _is_tested(connection: Any, *, may_ask: bool) -> bool:
    """Whether releases are tested on such a database. MySQL and MariaDB have one backend, so the server is asked."""
    if connection.vendor == "mysql":
        return not may_ask or bool(connection.mysql_is_mariadb and connection.mysql_version >= OLDEST_MARIADB)
    return connection.vendor in {"postgresql", "sqlite"}
