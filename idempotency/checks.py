"""System checks: a wrong setting is found by ``manage.py check``, not by the first customer.

One id an error. ``IDEMPOTENCY.TTL`` wrong is always E003, whatever is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from django.apps import AppConfig
from django.conf import settings as django_settings
from django.core import checks
from django.core.checks import CheckMessage, Error, Tags, register
from django.db import DEFAULT_DB_ALIAS, connections, router

from . import conf
from .operation import Attach, problem_of, registry

#: The option of ``problem_of`` that a setting gives the default of, and the id of its error.
SETTINGS = {
    "TTL": ("ttl", "E003"),
    "LEASE": ("lease", "E004"),
    "IN_PROGRESS": ("in_progress", "E005"),
    "REQUIRED": ("required", "E006"),
    "METHODS": ("methods", "E007"),
    "ACCOUNT": ("account", "E008"),
    "RECORDABLE": ("recordable", "E009"),
    "RECORDED_HEADERS": ("headers", "E010"),
    "MAX_BODY": ("max_body", "E011"),
    "ERROR_RESPONSE": ("error_response", "E012"),
    "MAX_RETRY_AFTER": ("max_retry_after", "E013"),
}

HINTS = {
    "TTL": "For example timedelta(days=3): longer than any client or queue goes on retrying.",
    "LEASE": "For example timedelta(seconds=60): longer than the slowest handler may take.",
    "IN_PROGRESS": "Import CONFLICT, ACCEPTED or Wait from idempotency.",
    "REQUIRED": "False lets a request without a key run unprotected.",
    "METHODS": 'For example ("POST", "PATCH").',
    "ACCOUNT": "A function of the request that returns the account's identifier as a str, or None to refuse.",
    "RECORDABLE": "A function of the status (int) that returns whether it is an outcome (bool).",
    "RECORDED_HEADERS": 'For example ("Location", "ETag"). Credentials are never recorded, whatever is listed.',
    "MAX_BODY": "For example 1024 * 1024.",
    "ERROR_RESPONSE": "A function of the request and the error that returns a response.",
    "MAX_RETRY_AFTER": "For example timedelta(seconds=30).",
}


@register("idempotency")
def check_settings(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """The entries of ``IDEMPOTENCY``, one by one and together."""
    entries = getattr(django_settings, conf.SETTING, {})
    if not isinstance(entries, Mapping):
        return [
            Error(
                f"IDEMPOTENCY must be a dictionary, not {type(entries).__name__}.",
                hint='For example IDEMPOTENCY = {"TTL": timedelta(days=3)}.',
                id="idempotency.E001",
            )
        ]
    messages: list[CheckMessage] = []
    for name, value in entries.items():
        if name not in SETTINGS:
            near = get_close_matches(str(name), SETTINGS, n=1, cutoff=0.5)
            messages.append(
                Error(
                    f"IDEMPOTENCY has no entry {name!r}.",
                    hint=f"Did you mean {near[0]!r}?" if near else f"It takes {', '.join(sorted(SETTINGS))}.",
                    id="idempotency.E002",
                )
            )
            continue
        option, error_id = SETTINGS[name]
        problem = _problem_of(option, value)
        if problem:
            messages.append(
                Error(
                    f"IDEMPOTENCY[{name!r}] {problem}, not {value!r}.",
                    hint=HINTS[name],
                    id=f"idempotency.{error_id}",
                )
            )
    if not messages and conf.settings.lease >= conf.settings.ttl:
        messages.append(
            Error(
                f"IDEMPOTENCY['LEASE'] ({conf.settings.lease}) must be shorter than IDEMPOTENCY['TTL'] "
                f"({conf.settings.ttl}).",
                hint="The lease is how long a crash blocks a key; the TTL is how long its outcome is kept.",
                id="idempotency.E014",
            )
        )
    return messages or _check_operations()


def _problem_of(option: str, value: Any) -> str | None:
    problem = problem_of(option, value)
    if isinstance(value, Attach):
        return "can't be Attach(location), which is of one operation's job: declare it there"
    if problem is None and isinstance(value, str):
        try:
            if not callable(conf.resolve(value)):
                return "must name a callable"
        except ImportError as error:
            return f"can't be imported ({error})"
    return problem


def _check_operations() -> list[CheckMessage]:
    """What an operation declares in part becomes contradictory only together with the settings."""
    return [
        Error(
            f"Operation {operation.name!r} has a lease ({operation.lease}) that is not shorter than its ttl "
            f"({operation.ttl}).",
            hint="Give the operation a shorter lease= or a longer ttl=.",
            id="idempotency.E015",
        )
        for operation in registry
        if operation.lease >= operation.ttl
    ]


@register("idempotency", Tags.database)
def check_databases(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """The database that records live in. Looks at its settings only, and connects to nothing."""
    from .models import IdempotencyRecord

    messages: list[CheckMessage] = []
    alias = router.db_for_write(IdempotencyRecord)
    connection = connections[alias]
    if not connection.settings_dict["AUTOCOMMIT"]:
        messages.append(
            Error(
                f"Database {alias!r} has AUTOCOMMIT off, so a claim could not be committed before its operation runs.",
                hint="Remove AUTOCOMMIT from the database's settings.",
                id="idempotency.E016",
            )
        )
    if alias != DEFAULT_DB_ALIAS and any(operation.transaction for operation in registry):
        messages.append(
            checks.Warning(
                f"Records are kept in database {alias!r}. Operations with transaction=True protect writes to that "
                f"database only.",
                hint="Keep records where the protected operations write, or declare the others with "
                "transaction=False and their recovery.",
                id="idempotency.W001",
            )
        )
    options = connection.settings_dict.get("OPTIONS", {})
    if connection.vendor == "sqlite" and str(options.get("transaction_mode")).upper() not in {"IMMEDIATE", "EXCLUSIVE"}:
        messages.append(
            checks.Warning(
                f"SQLite database {alias!r} opens its transactions deferred. One that reads before it writes fails at "
                f"once when another has written meanwhile, whatever the timeout.",
                hint='Set OPTIONS = {"transaction_mode": "IMMEDIATE"} on the database.',
                id="idempotency.W002",
            )
        )
    if connection.vendor not in {"postgresql", "sqlite"}:
        messages.append(
            checks.Warning(
                f"Database {alias!r} is a {connection.vendor} one. This release is tested on PostgreSQL and SQLite.",
                hint="Keep the records on PostgreSQL.",
                id="idempotency.W003",
            )
        )
    return messages
