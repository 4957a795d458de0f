"""The entries of ``IDEMPOTENCY``: those that apply to the whole project are declared here, the others by their options.

The check, the hint and the value in force of an entry are derived from its declaration. A test compares it with the
documentation's list.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from . import validators
from .table import OPTIONS, Option, option, options_of


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ProjectOptions:
    """The entries that apply to all operations, with their values in force. None is an argument of an operation."""

    max_retry_after: timedelta = option(
        default=timedelta(seconds=30),
        problem_of=validators.positive_duration,
        takes="timedelta",
        meaning="the longest `Retry-After`",
        check_id="idempotency.E013",
        hint="For example timedelta(seconds=30).",
    )
    error_response: Callable[[Any, Any], Any] | None = option(
        problem_of=validators.callable_or_path,
        takes="callable(request, error) → response, or its dotted path",
        meaning="another envelope for errors",
        check_id="idempotency.E012",
        hint="A function of the request and the error that returns a response.",
    )
    every_route: bool = option(
        default=False,
        problem_of=validators.flag,
        takes="bool",
        meaning="True: each POST, PUT, PATCH and DELETE of the project is protected if it brings a key. Needs "
        "`IdempotencyMiddleware`",
        check_id="idempotency.E042",
        hint="True protects the routes without a decorator.",
    )
    except_routes: Collection[str] = option(
        default=(),
        problem_of=validators.names,
        takes="patterns",
        meaning="the routes that `EVERY_ROUTE` leaves alone, by path, name or view, as in a shell",
        check_id="idempotency.E043",
        hint='For example ("/webhooks/*", "signup").',
    )
    problem_docs: str | None = option(
        problem_of=validators.url,
        is_path=False,
        takes="URL",
        meaning="the page that explains the problems: a problem's `type` is this URL with the problem's name as its "
        "fragment. None: a URN",
        check_id="idempotency.E041",
        hint='For example "https://docs.example.com/idempotency/problems.html".',
    )
    fingerprint_keys: Sequence[str | bytes] | None = option(
        problem_of=validators.secrets,
        takes="list of str or bytes",
        meaning="the secrets that fingerprints are keyed with: the first makes new ones, all are tried on old ones. "
        "None: `SECRET_KEY` and `SECRET_KEY_FALLBACKS`",
        check_id="idempotency.E019",
        hint="For example [NEW_SECRET, OLD_SECRET]. Keep the old secret for as long as records made with it are kept.",
        is_secret=True,
    )
    encryption_keys: Sequence[str | bytes] | None = option(
        problem_of=validators.fernet_keys,
        takes="list of str or bytes",
        meaning="the keys that recorded bodies are encrypted with: the first encrypts new ones, all are tried on old "
        "ones. None: they are not encrypted",
        check_id="idempotency.E026",
        hint="For example [NEW_KEY, OLD_KEY], each made by cryptography.fernet.Fernet.generate_key(). Keep an old key "
        "for as long as records made with it are kept.",
        is_secret=True,
    )
    renewal_databases: Mapping[str, str] = option(
        default={},
        problem_of=validators.aliases,
        takes="dict of aliases",
        meaning="for a database of records, another entry of `DATABASES` that leads to the same database: leases are "
        "renewed over it",
        check_id="idempotency.E029",
        hint='For example {"default": "renewals"}, with both aliases in DATABASES.',
    )


#: All entries of ``IDEMPOTENCY``, by name: the defaults of options, and those of the project.
SETTINGS: Final[Mapping[str, Option]] = {
    **{option.setting: option for option in OPTIONS.values() if option.setting is not None},
    **{
        name.upper(): replace(option, setting=name.upper(), is_argument=False)
        for name, option in options_of(ProjectOptions).items()
    },
}
