"""System checks of the settings and the databases."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from importlib import import_module
from typing import Any, TypeVar

from django.apps import AppConfig, apps
from django.conf import settings as django_settings
from django.core import checks
from django.core.checks import CheckMessage, Error, Tags, register
from django.db import DEFAULT_DB_ALIAS, DatabaseError, InterfaceError, connections, router, transaction
from django.db.migrations.recorder import MigrationRecorder
from django.db.models import Model

from .conf import mistakes_in_settings, settings
from .operate.statistics import undeclared
from .store import Upkeep, records_database, upkeep_for
from .views.checks import check, declared_operations

OLDEST_MARIADB = (10, 11)

_Result = TypeVar("_Result")


@check()
def check_settings() -> Iterator[CheckMessage]:
    mistakes = mistakes_in_settings()
    if not mistakes:  # an operation takes defaults from the settings, so it can contradict them
        mistakes = [mistake for operation in declared_operations() for mistake in operation.mistakes()]
    yield from mistakes


@check()
def check_celery() -> Iterator[CheckMessage]:
    if "celery" in sys.modules and not apps.is_installed("idempotency.contrib.celery"):
        yield checks.Warning(
            "This process has imported Celery, but 'idempotency.contrib.celery' is not in INSTALLED_APPS. If a "
            "protected operation runs again, each task that it publishes takes effect again.",
            hint="Add 'idempotency.contrib.celery' to INSTALLED_APPS, or silence this check if no protected operation "
            "publishes tasks.",
            id="idempotency.W017",
        )


@register("idempotency", Tags.database)
def check_databases(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """Connects to MySQL and MariaDB, and to PostgreSQL if ``databases`` names it."""
    using = records_database()
    messages = [*_wrong_connections(using), *_doubtful_connections(using, databases)]
    if databases is not None and using in databases:
        messages += [*_doubtful_durability(using), *_tables_outside_of_citus(using), *_undeclared_operations(using)]
    for alias in databases or ():
        messages += _incomplete_tables(alias)
    if not mistakes_in_settings():
        messages += [*_wrong_renewals(databases or ()), *_starving_renewals(using, databases or ())]
    return messages


def _wrong_connections(using: str) -> Iterator[CheckMessage]:
    """Settings and drivers that break the protocol."""
    connection: Any = connections[using]
    if not connection.settings_dict["AUTOCOMMIT"]:
        yield Error(
            f"Database {using!r} has AUTOCOMMIT off, so a claim could not be committed before its operation runs.",
            hint="Remove AUTOCOMMIT from the database's settings.",
            id="idempotency.E016",
        )
    if getattr(connection.Database, "__name__", "") == "psycopg2":
        yield Error(
            f"Database {using!r} uses psycopg2. Its errors differ from psycopg 3's and would be misread.",
            hint="Install psycopg 3 (pip install 'psycopg>=3.2'). Django uses it if both are installed.",
            id="idempotency.E020",
        )


def _doubtful_connections(using: str, databases: Sequence[str] | None) -> Iterator[CheckMessage]:
    """Databases that work less well, or that operations don't write to."""
    connection: Any = connections[using]
    options = connection.settings_dict.get("OPTIONS", {})
    if connection.vendor == "sqlite" and str(options.get("transaction_mode")).upper() not in {"IMMEDIATE", "EXCLUSIVE"}:
        yield checks.Warning(
            f"SQLite database {using!r} opens deferred transactions. If a transaction reads before it writes, and "
            f"another one has written meanwhile, it fails at once, without waiting for the timeout.",
            hint='Set OPTIONS = {"transaction_mode": "IMMEDIATE"} on the database.',
            id="idempotency.W002",
        )
    is_tested = connection.vendor in {"postgresql", "sqlite"}
    if connection.vendor == "mysql":  # of MariaDB and of MySQL, so the server decides
        may_query = databases is None or using in databases
        is_tested = not may_query or (connection.mysql_is_mariadb and connection.mysql_version >= OLDEST_MARIADB)
    if not is_tested:
        yield checks.Warning(
            f"Database {using!r} is a {connection.display_name} database. This release is tested on PostgreSQL, "
            f"SQLite, and MariaDB {OLDEST_MARIADB[0]}.{OLDEST_MARIADB[1]} and later.",
            hint="Keep the records on PostgreSQL.",
            id="idempotency.W003",
        )
    if using != DEFAULT_DB_ALIAS and any(operation.declared["transaction"] for operation in declared_operations()):
        yield checks.Warning(
            f"Records are kept in database {using!r}. Operations with transaction=True protect writes to that "
            f"database only.",
            hint="Keep records in the database that the protected operations write to, or declare operations that "
            "write elsewhere with transaction=False and a recovery.",
            id="idempotency.W001",
        )


def _tables_outside_of_citus(using: str) -> Iterator[CheckMessage]:
    if outside := _fetch(using, lambda upkeep: upkeep.tables_outside_of_citus()):
        yield checks.Warning(
            f"Database {using!r} is a Citus cluster that doesn't manage these tables: {', '.join(outside)}. If the "
            f"coordinator crashes during a COMMIT, writes to them may be lost although the transaction's writes to "
            f"other tables are kept.",
            hint="Distribute the tables of idempotency. Distribute each table that a protected operation writes to, "
            "make it a reference table, or call citus_add_local_table_to_metadata('…', cascade_via_foreign_keys => "
            "true) for it.",
            id="idempotency.W014",
        )


def _undeclared_operations(using: str) -> Iterator[CheckMessage]:
    declared_operations()
    found = _fetch(using, lambda store: undeclared(store.using).by_operation)
    if found:
        listed = [f"{name!r} ({count})" for name, count in sorted(found.items(), key=lambda each: (-each[1], each[0]))]
        yield checks.Warning(
            f"Database {using!r} has recent records of operations that no code declares: {_some(listed, 20)}. If an "
            f"operation was renamed, or its view moved to another module without a stable name, retries of these "
            f"requests run again.",
            hint="Declare the operation under its earlier name. If its view is gone, or the operation is declared only "
            "by running code, such as claim() with a name, declare it in an operations.py, or silence this check.",
            id="idempotency.W027",
        )


def _incomplete_tables(using: str) -> Iterator[CheckMessage]:
    """The missing parts of our tables, if all of our migrations are applied. Otherwise ``migrate`` reports them."""
    missing = _fetch(using, lambda upkeep: [*_missing_parts(upkeep.connection)])
    if missing:
        yield Error(
            f"Database {using!r} lacks {', '.join(missing)}, although the migrations are applied. Protected operations "
            f"fail, or lose their protection.",
            hint="migrate skips what it has applied. Restore the tables, or create what is missing as Troubleshoot, "
            "under 503, describes. Commands run with --skip-checks.",
            id="idempotency.E032",
        )


def _missing_parts(connection: Any) -> Iterator[str]:
    introspection = connection.introspection
    applied = MigrationRecorder(connection).applied_migrations()
    with connection.cursor() as cursor:
        tables = introspection.table_names(cursor, include_views=True)
        for model in _our_models(connection.alias, applied):
            table = model._meta.db_table
            if table not in tables:
                yield f"the table {table}"
                continue
            columns = {column.name for column in introspection.get_table_description(cursor, table)}
            found = introspection.get_constraints(cursor, table).values()
            unique = [tuple(each["columns"]) for each in found if each["unique"]]
            yield from (
                f"the column {table}.{field.attname}" for field in model._meta.fields if field.attname not in columns
            )
            # No field has a column of another name.
            yield from (
                f"the constraint {constraint.name} of {table}"
                for constraint in model._meta.total_unique_constraints
                if constraint.fields not in unique
            )


def _our_models(using: str, applied: Container[tuple[str, str]]) -> Iterator[type[Model]]:
    """The models of this package's installed apps whose migrations are all applied to a database."""
    for app in apps.get_app_configs():
        if app.name.partition(".")[0] != __package__ or app.label in django_settings.MIGRATION_MODULES:
            continue
        for model in app.get_models():
            folder = import_module(f"{app.name}.migrations").__path__
            names = [(app.label, name) for _, name, _ in pkgutil.iter_modules(folder)]
            if all(name in applied for name in names) and router.allow_migrate_model(using, model):
                yield model


def _doubtful_durability(using: str) -> Iterator[CheckMessage]:
    """Servers that may lose confirmed claims, so that operations with outside effects run again."""
    outside = sorted(operation.name for operation in declared_operations() if not operation.declared["transaction"])
    replication = _fetch(using, lambda upkeep: upkeep.replication()) if outside else None
    if replication is None:
        return
    names = _some(outside)
    if replication.asynchronous_standbys and not replication.is_synchronous:
        yield checks.Warning(
            f"Database {using!r} has asynchronous standbys ({replication.asynchronous_standbys}) and no synchronous "
            f"one. If one is promoted, claims may be missing, and operations with transaction=False run again: "
            f"{names}.",
            hint="Set synchronous_standby_names on the server, for example to 'ANY 1 (a, b)'.",
            id="idempotency.W015",
        )
    has_standbys = replication.is_synchronous or replication.asynchronous_standbys
    if replication.synchronous_commit == "off" or (replication.synchronous_commit == "local" and has_standbys):
        yield checks.Warning(
            f"Database {using!r} has synchronous_commit = {replication.synchronous_commit} for this role. After a "
            f"crash or a failover claims may be missing, and operations with transaction=False run again: {names}.",
            hint="Set synchronous_commit to 'on' for the role, the database or the server.",
            id="idempotency.W013",
        )


def _wrong_renewals(databases: Sequence[str]) -> Iterator[CheckMessage]:
    for using, renewals in settings().renewal_databases.items():
        yield from _wrong_connections(renewals)
        identity, other_identity = (
            _fetch(alias, lambda upkeep: upkeep.identity()) if using in databases else None
            for alias in (using, renewals)
        )
        if identity is not None and other_identity != identity:
            yield Error(
                f"IDEMPOTENCY['RENEWAL_DATABASES'] renews leases of database {using!r} over {renewals!r}, which can't "
                f"be reached or is another database.",
                hint="Both entries of DATABASES must lead to the same database of the same server.",
                id="idempotency.E030",
            )


def _starving_renewals(using: str, databases: Sequence[str]) -> Iterator[CheckMessage]:
    with_heartbeat = sorted(operation.name for operation in declared_operations() if operation.declared["heartbeat"])
    if not with_heartbeat or using not in databases or using in settings().renewal_databases:
        return
    if _fetch(using, lambda upkeep: upkeep.is_pooled()):
        yield checks.Warning(
            f"Database {using!r} is behind a pooler. If handlers hold all its sessions, heartbeats wait until the "
            f"leases are over, and operations run again: {_some(with_heartbeat)}.",
            hint="Name another way to the database in IDEMPOTENCY['RENEWAL_DATABASES']. If the pool has a session for "
            "each handler and one for each process, silence this check.",
            id="idempotency.W018",
        )


def _some(names: Sequence[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")


def _fetch(using: str, query: Callable[[Upkeep], _Result]) -> _Result | None:
    """The result of a query, or None if the server can't be reached."""
    try:
        with transaction.atomic(using):
            return query(upkeep_for(using))
    except (DatabaseError, InterfaceError):
        return None
