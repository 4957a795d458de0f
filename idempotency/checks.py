"""System checks: a wrong setting is found by ``manage.py check``, not by the first customer.

One id an error. ``IDEMPOTENCY.TTL`` wrong is always E003, whatever is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig
from django.conf import settings as django_settings
from django.core import checks
from django.core.checks import CheckMessage, Error, Tags, register
from django.db import DEFAULT_DB_ALIAS, connections

from .conf import SETTING, problems_of
from .operation import registry
from .protocol.transactions import alias


@register("idempotency")
def check_settings(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """The entries of ``IDEMPOTENCY``, one by one and together, and then each operation under them."""
    problems = problems_of(getattr(django_settings, SETTING, {}))
    if not problems:  # what an operation declares in part becomes contradictory only together with the settings
        problems = [problem for operation in registry for problem in operation.problems()]
    return [Error(problem.message, hint=problem.hint, id=problem.check_id) for problem in problems]


@register("idempotency", Tags.database)
def check_databases(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """The database that records live in. Looks at its settings only, and connects to nothing."""
    using = alias()
    connection: Any = connections[using]
    messages = [*_wrong_connections(using, connection), *_doubtful_connections(using, connection)]
    if using != DEFAULT_DB_ALIAS and any(operation.transaction for operation in registry):
        messages.append(
            checks.Warning(
                f"Records are kept in database {using!r}. Operations with transaction=True protect writes to that "
                f"database only.",
                hint="Keep records where the protected operations write, or declare the others with "
                "transaction=False and their recovery.",
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
            f"Database {using!r} is reached through psycopg2, which names errors in another way than psycopg 3, so "
            f"they would be misread.",
            hint="Install psycopg 3 (pip install 'psycopg>=3.2'). Django uses it if both are installed.",
            id="idempotency.E020",
        )


def _doubtful_connections(using: str, connection: Any) -> Iterator[CheckMessage]:
    """Databases that work less well, or that nobody has tested."""
    options = connection.settings_dict.get("OPTIONS", {})
    if connection.vendor == "sqlite" and str(options.get("transaction_mode")).upper() not in {"IMMEDIATE", "EXCLUSIVE"}:
        yield checks.Warning(
            f"SQLite database {using!r} opens its transactions deferred. One that reads before it writes fails at "
            f"once when another has written meanwhile, whatever the timeout.",
            hint='Set OPTIONS = {"transaction_mode": "IMMEDIATE"} on the database.',
            id="idempotency.W002",
        )
    if connection.vendor not in {"postgresql", "sqlite"}:
        yield checks.Warning(
            f"Database {using!r} is a {connection.vendor} one. This release is tested on PostgreSQL and SQLite.",
            hint="Keep the records on PostgreSQL.",
            id="idempotency.W003",
        )
