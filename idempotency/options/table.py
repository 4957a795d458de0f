"""The options of an operation and the entries of ``IDEMPOTENCY``, each declared once.

``Options`` and ``ProjectOptions`` declare the type of each value in force, and everything else in an ``Option``. The
arguments of an operation, the settings and the system checks are derived from them. ``docs/reference/settings.md``
explains each option. ``TaskArguments``, ``BlockArguments`` and ``RequestArguments`` are the types of keyword arguments,
which may also be None or a dotted path to a function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from enum import Flag, auto
from typing import Any, Final, TypedDict

from django.utils.module_loading import import_string

from ..lifecycle import Recovery
from . import validators
from .values import CONFLICT, IETF, REEXECUTE, Attach, InProgressAnswer, Reconcile

#: The headers that belong to an outcome. All others are set again for each response. Vary belongs to Cache-Control: it
#: tells a cache for which requests it may use a response.
DEFAULT_RECORDED_HEADERS: Final = (
    "Location",
    "ETag",
    "Last-Modified",
    "Cache-Control",
    "Expires",
    "Vary",
    "Retry-After",
    "Content-Disposition",
    "Content-Encoding",
    "Content-Language",
    "Content-Location",
    "Link",
)


class Use(Flag):
    """What an operation protects."""

    REQUEST = auto()
    BLOCK = auto()  # of ``claim()``
    TASK = auto()  # under ``@idempotent_task``


EVERYWHERE: Final = Use.REQUEST | Use.BLOCK | Use.TASK


@dataclass(frozen=True)
class Option:
    """One option of an operation, or one entry of ``IDEMPOTENCY``."""

    #: The validator. Returns the problem with a value, or None.
    problem_of: Callable[[Any], str | None]
    #: The keyword argument, and the attribute of ``Options`` or ``Settings`` with the value in force.
    name: str = ""
    #: The entry of ``IDEMPOTENCY`` that sets the default, if any.
    setting: str | None = None
    #: The value if neither an argument nor a setting is given.
    default: Any = None
    #: The hint of the system check for the setting.
    hint: str = ""
    #: True if a message must not show the value.
    is_secret: bool = False
    #: The uses for which the option has an effect. For others it is refused.
    applies_to: Use = EVERYWHERE

    def problem_of_setting(self, value: Any) -> str | None:
        """The problem with a value of the setting, or None. Imports a dotted path."""
        if value is None and self.default is None:
            return None
        if isinstance(value, Attach):
            return "belongs to one operation and its job: declare it there"
        return self.problem_of(value) or self.problem_of_path(value)

    def complaint(self, subject: str, problem: str, value: Any) -> str:
        """A sentence about the problem that a validator found in the value of a setting or an argument."""
        if self.is_secret:
            return f"{subject} {problem}."
        if problem.startswith("must "):
            return f"{subject} {problem}, not {value!r}."
        return f"{subject} is {value!r}, which {problem}."

    def value_of(self, value: Any) -> Any:
        """The value in force for an argument or a setting, which may be a dotted path.

        :raises ImportError: the path names no object.
        """
        if not self._is_path(value):
            return value
        if not all(value.split(".")):  # import_string() would try a relative import, or an empty name
            raise ImportError(f"{value!r} is not a dotted path")
        return import_string(value)

    def problem_of_path(self, value: Any) -> str | None:
        """The problem with a dotted path to a callable, or None."""
        try:
            return "must name a callable" if self._is_path(value) and not callable(self.value_of(value)) else None
        except ImportError as error:
            return f"can't be imported ({error})"

    def _is_path(self, value: Any) -> bool:
        return isinstance(value, str) and self.problem_of is validators.callable_or_path


def option(problem_of: Callable[[Any], str | None], **declaration: Any) -> Any:
    """Declare an ``Option`` as a field of a dataclass."""
    return field(metadata={"option": Option(problem_of, **declaration)})


def options_of(declared: type) -> Mapping[str, Option]:
    """The options by name. An option with a hint has an entry of ``IDEMPOTENCY``, by default its name in capitals."""
    options = {each.name: each.metadata["option"] for each in fields(declared)}
    return {
        name: replace(option, name=name, setting=option.setting or (name.upper() if option.hint else None))
        for name, option in options.items()
    }


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Options:
    """The options of an operation, with their values in force."""

    retention: timedelta = option(
        validators.positive_duration,
        # Longer than clients and queues retry: on Monday a dead-letter queue may replay requests from Friday.
        default=timedelta(days=3),
        hint="For example timedelta(days=3). It must be longer than clients and queues keep retrying.",
    )
    lease: timedelta = option(
        validators.positive_duration,
        # Longer than the usual worker timeout of 30 s.
        default=timedelta(seconds=60),
        hint="For example timedelta(seconds=60). It must be longer than the slowest handler may take.",
    )
    body_retention: timedelta | None = option(
        validators.positive_duration,
        hint="For example timedelta(hours=24). It must be shorter than RETENTION.",
    )
    max_key_age: timedelta | None = option(
        validators.positive_duration,
        hint="For example timedelta(days=2). It must be shorter than RETENTION by five minutes or more.",
        applies_to=Use.REQUEST | Use.BLOCK,
    )
    heartbeat: timedelta | None = option(validators.positive_duration)
    in_progress: InProgressAnswer = option(
        validators.in_progress,
        default=CONFLICT,
        hint="Import CONFLICT, ACCEPTED or Wait from idempotency.",
    )
    key_required: bool = option(
        validators.flag,
        default=True,
        hint="False lets a request without a key run unprotected.",
        applies_to=Use.REQUEST,
    )
    methods: Collection[str] = option(
        validators.methods,
        default=("POST", "PATCH"),
        hint='For example ("POST", "PATCH").',
        applies_to=Use.REQUEST,
    )
    account: Callable[[Any], str | None] = option(
        validators.callable_or_path,
        default="idempotency.accounts.authenticated_user",
        hint="A function of the request that returns the account's identifier as a str, or None to refuse.",
        applies_to=Use.REQUEST,
    )
    recordable: Callable[[int], bool] = option(
        validators.callable_or_path,
        default="idempotency.is_recordable",
        hint="A function of the status (int) that returns whether it is an outcome (bool).",
        applies_to=Use.REQUEST,
    )
    recorded_headers: Collection[str] = option(
        validators.recorded_headers,
        default=DEFAULT_RECORDED_HEADERS,
        hint='For example ("Location", "ETag", "X-Shop-*"). Cookies and credentials are never recorded.',
        applies_to=Use.REQUEST,
    )
    max_response_body: int = option(validators.positive_bytes, default=1024 * 1024, hint="For example 1024 * 1024.")
    transaction: bool = option(validators.flag, default=True)
    recovery: Recovery = option(validators.recovery, default=REEXECUTE)
    payload: Callable[..., Any] | None = option(validators.callable_object, applies_to=Use.REQUEST)
    payload_headers: Collection[str] = option(validators.names, default=(), applies_to=Use.REQUEST)
    rebuild: Callable[[str, Any], Any] | None = option(validators.callable_object, applies_to=Use.REQUEST)
    redact: Callable[[int, Mapping[str, str], bytes], bytes] | None = option(validators.callable_object)
    key: Callable[[Any], str | None] | None = option(
        validators.callable_or_path,
        hint="A function of the request that returns the key as a str, or None if the request has none.",
        applies_to=Use.REQUEST,
    )
    profile: str = option(
        validators.profile,
        default=IETF,
        hint="The reference page of the wire has a table of the profiles.",
        applies_to=Use.REQUEST,
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ProjectOptions:
    """The entries that apply to all operations, with their values in force."""

    max_retry_after: timedelta = option(
        validators.positive_duration,
        default=timedelta(seconds=30),
        hint="For example timedelta(seconds=30).",
    )
    error_response: Callable[[Any, Any], Any] | None = option(
        validators.callable_or_path,
        hint="A function of the request and the error that returns a response.",
    )
    problem_docs: str | None = option(
        validators.url,
        hint='For example "https://docs.example.com/idempotency/reference/wire.html".',
    )
    fingerprint_keys: Sequence[str | bytes] | None = option(
        validators.secrets,
        hint="For example [NEW_SECRET, OLD_SECRET]. Keep the old secret for as long as records made with it are kept.",
        is_secret=True,
    )
    encryption_keys: Sequence[str | bytes] | None = option(
        validators.fernet_keys,
        hint="For example [NEW_KEY, OLD_KEY], each made by cryptography.fernet.Fernet.generate_key(). Keep an old key "
        "for as long as records made with it are kept.",
        is_secret=True,
    )
    renewal_databases: Mapping[str, str] = option(
        validators.aliases,
        default={},
        hint='For example {"default": "renewals"}, with both aliases in DATABASES.',
    )


#: The options of an operation, by name.
OPTIONS: Final = options_of(Options)

#: All entries of ``IDEMPOTENCY``, by name: the defaults of operations' options, and the project's options.
SETTINGS: Final[Mapping[str, Option]] = {
    option.setting: option
    for option in (*OPTIONS.values(), *options_of(ProjectOptions).values())
    if option.setting is not None
}


class TaskArguments(TypedDict, total=False):
    """The keyword arguments of ``@idempotent_task``. None is the same as omission."""

    retention: timedelta | None
    lease: timedelta | None
    body_retention: timedelta | None
    heartbeat: timedelta | None
    in_progress: InProgressAnswer | None
    max_response_body: int | None
    transaction: bool
    recovery: Recovery | Reconcile | None
    redact: Callable[[int, Mapping[str, str], bytes], bytes] | None


class BlockArguments(TaskArguments, total=False):
    """The keyword arguments of ``claim()``."""

    max_key_age: timedelta | None


class RequestArguments(BlockArguments, total=False):
    """The keyword arguments of ``Operation.declare()`` and ``@idempotent``."""

    key_required: bool | None
    methods: Collection[str] | None
    account: Callable[[Any], str | None] | str | None
    recordable: Callable[[int], bool] | str | None
    recorded_headers: Collection[str] | None
    payload: Callable[..., Any] | None
    payload_headers: Collection[str] | None
    rebuild: Callable[[str, Any], Any] | None
    key: Callable[[Any], str | None] | str | None
    profile: str | None
