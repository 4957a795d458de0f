"""The options of an operation, each declared once.

``Options`` is that declaration: the type of each value in force, and an ``Option`` with everything else. The
constructor of ``Operation``, the settings, the system checks and their hints are derived from it. The types of the
keyword arguments are in ``Arguments`` and ``RequestArguments``, because a caller may leave one out, or name a function
by its path. A test compares both with the documentation's list.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any, Final, TypedDict

from django.utils.module_loading import import_string

from ..lifecycle import Recovery
from . import validators
from .values import CONFLICT, IETF, REEXECUTE, Attach, InProgressAnswer, Reconcile

#: The headers that belong to the outcome. All other headers are made again for each response. Vary is in the list
#: because Cache-Control is: a cache that learns how long it may keep a response must also learn for which requests.
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


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of an operation, or one entry of ``IDEMPOTENCY``."""

    #: The keyword argument. The attribute of this name of ``Options`` or ``Settings`` has the value in force.
    name: str = ""
    #: The entry of ``IDEMPOTENCY`` that sets the default, or None if there is no such entry.
    setting: str | None = None
    #: The value in force if neither the argument nor the setting is given.
    default: Any = None
    #: The validator: returns what is wrong with a value, or None.
    problem_of: Callable[[Any], str | None]
    #: The type, as the documentation's list writes it.
    takes: str
    #: The meaning, as the documentation's list writes it.
    meaning: str
    #: The id of the system check for the setting.
    check_id: str = ""
    #: The advice of the system check.
    hint: str = ""
    #: False if a text is a value itself, and not the dotted path of one.
    is_path: bool = True
    #: True if a message must not show the value.
    is_secret: bool = False
    #: False for an entry of ``IDEMPOTENCY`` that is the same for all operations.
    is_argument: bool = True

    def problem_of_setting(self, value: Any) -> str | None:
        """What is wrong with a value of the setting, or None. A dotted path is imported."""
        if value is None and self.default is None:
            return None
        if isinstance(value, Attach):
            return "belongs to one operation and its job: declare it there"
        return self.problem_of(value) or self.problem_of_path(value)

    def complaint(self, subject: str, problem: str, value: Any) -> str:
        """Describe a wrong value in a sentence. The value itself is left out if it is a secret.

        :param subject: the setting or argument that has the value.
        :param problem: what ``problem_of_setting()`` or ``problem_of_path()`` returned.
        :param value: the wrong value.
        """
        if self.is_secret:
            return f"{subject} {problem}."
        return (
            f"{subject} {problem}, not {value!r}."
            if problem.startswith("must ")
            else f"{subject} is {value!r}, which {problem}."
        )

    def value_of(self, value: Any) -> Any:
        """The value in force for the argument or the setting ``value``, which may be a dotted path.

        :raises ImportError: the path names no object.
        """
        return import_string(value) if isinstance(value, str) and self.is_path else value

    def problem_of_path(self, value: Any) -> str | None:
        """If the value is a text: what is wrong with it as a dotted path to a callable. Otherwise None."""
        if not isinstance(value, str) or not self.is_path:
            return None
        try:
            return None if callable(self.value_of(value)) else "must name a callable"
        except ImportError as error:
            return f"can't be imported ({error})"


def option(**declaration: Any) -> Any:
    """Declare an ``Option`` as a field of a dataclass, which has the value in force."""
    return field(metadata={"option": Option(**declaration)})


def options_of(declared: type) -> Mapping[str, Option]:
    return {each.name: replace(each.metadata["option"], name=each.name) for each in fields(declared)}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Options:
    """The options of an operation, with their values in force."""

    ttl: timedelta = option(
        setting="TTL",
        # Longer than clients and queues go on retrying. The usual longest case is a dead-letter queue that is
        # replayed on Monday and holds requests of Friday.
        default=timedelta(days=3),
        problem_of=validators.positive_duration,
        takes="timedelta",
        meaning="retention: how long an outcome is kept and a retry recognised",
        check_id="idempotency.E003",
        hint="For example timedelta(days=3). It must be longer than any client or queue goes on retrying.",
    )
    lease: timedelta = option(
        setting="LEASE",
        # Longer than a handler may take. The usual worker timeout is 30 s.
        default=timedelta(seconds=60),
        problem_of=validators.positive_duration,
        takes="timedelta",
        meaning="how long a claim is presumed alive; shorter than the retention",
        check_id="idempotency.E004",
        hint="For example timedelta(seconds=60). It must be longer than the slowest handler may take.",
    )
    body_ttl: timedelta | None = option(
        setting="BODY_TTL",
        problem_of=validators.positive_duration,
        takes="timedelta",
        meaning="how long the response of a completed record is kept; shorter than the retention. Later, a purge "
        "deletes it, and a retry is answered by `rebuild` or with 409. None: as long as the record",
        check_id="idempotency.E027",
        hint="For example timedelta(hours=24). It must be shorter than TTL.",
    )
    max_key_age: timedelta | None = option(
        setting="MAX_KEY_AGE",
        problem_of=validators.positive_duration,
        takes="timedelta",
        meaning="a request that would begin under an older key is refused, if the key carries its time; at least "
        "five minutes shorter than the retention",
        check_id="idempotency.E023",
        hint="For example timedelta(days=2). It must be shorter than TTL by five minutes or more.",
    )
    timed_keys: bool = option(
        setting="TIMED_KEYS",
        default=False,
        problem_of=validators.flag,
        takes="bool",
        meaning="True: a request that would begin under a key without a time, other than a derived key, is refused",
        check_id="idempotency.E024",
        hint="True accepts version 7 UUIDs, ULIDs and derived keys only.",
    )
    heartbeat: timedelta | None = option(
        problem_of=validators.positive_duration,
        takes="timedelta",
        meaning="renews the lease while the handler runs, for this long in total; not above the retention",
    )
    idle_timeout: timedelta | None = option(
        problem_of=validators.positive_duration,
        takes="timedelta",
        meaning="PostgreSQL ends the handler's transaction when it has been idle for this long",
    )
    in_progress: InProgressAnswer = option(
        setting="IN_PROGRESS",
        default=CONFLICT,
        problem_of=validators.in_progress,
        takes="`CONFLICT`, `ACCEPTED`, `Wait(seconds)`; for one operation also `Attach(location)`",
        meaning="what a duplicate gets while the first request runs: 409, 202, or up to 30 s of waiting and then 409",
        check_id="idempotency.E005",
        hint="Import CONFLICT, ACCEPTED or Wait from idempotency.",
    )
    required: bool = option(
        setting="REQUIRED",
        default=True,
        problem_of=validators.flag,
        takes="bool",
        meaning="False: a request without a key runs unprotected",
        check_id="idempotency.E006",
        hint="False lets a request without a key run unprotected.",
    )
    methods: Collection[str] = option(
        setting="METHODS",
        default=("POST", "PATCH"),
        problem_of=validators.methods,
        takes="names in capitals",
        meaning="which methods are protected; others pass through",
        check_id="idempotency.E007",
        hint='For example ("POST", "PATCH").',
    )
    account: Callable[[Any], str | None] = option(
        setting="ACCOUNT",
        default="idempotency.conf.authenticated_user",
        problem_of=validators.callable_or_path,
        takes="callable(request) → str or None, or its dotted path",
        meaning="whose key it is; None refuses the request. The default is the authenticated user's primary key",
        check_id="idempotency.E008",
        hint="A function of the request that returns the account's identifier as a str, or None to refuse.",
    )
    recordable: Callable[[int], bool] = option(
        setting="RECORDABLE",
        default="idempotency.conf.is_recordable",
        problem_of=validators.callable_or_path,
        takes="callable(status) → bool, or its dotted path",
        meaning="which statuses are outcomes. The default: all but 408, 425, 429 and 5xx",
        check_id="idempotency.E009",
        hint="A function of the status (int) that returns whether it is an outcome (bool).",
    )
    headers: Collection[str] = option(
        setting="RECORDED_HEADERS",
        default=DEFAULT_RECORDED_HEADERS,
        problem_of=validators.recorded_headers,
        takes="names",
        meaning="headers kept with an outcome, besides Content-Type; `X-Shop-*` names all that begin so. "
        "Cookies and credentials never are",
        check_id="idempotency.E010",
        hint='For example ("Location", "ETag", "X-Shop-*"). Cookies and credentials are never recorded.',
    )
    max_body: int = option(
        setting="MAX_BODY",
        default=1024 * 1024,
        problem_of=validators.positive_bytes,
        takes="bytes",
        meaning="the largest body that is recorded; a larger one is refused and nothing commits",
        check_id="idempotency.E011",
        hint="For example 1024 * 1024.",
    )
    transaction: bool = option(
        default=True,
        problem_of=validators.flag,
        takes="bool",
        meaning="handler and record in one transaction of the record's database",
    )
    recovery: Recovery = option(
        default=REEXECUTE,
        problem_of=validators.recovery,
        takes="`REEXECUTE`, `Reconcile(fn)` or `PARK`",
        meaning="what an abandoned claim means; must be given with `transaction=False`",
    )
    command: Callable[..., Any] | None = option(
        problem_of=validators.callable_object,
        takes="callable(request) → object, or a DRF serializer class",
        meaning="what the fingerprint is taken of, instead of the parsed body",
    )
    rebuild: Callable[[str, Any], Any] | None = option(
        problem_of=validators.callable_object,
        takes="callable(reference, request) → response",
        meaning="answers a replay from a reference instead of a recorded body; with `body_ttl`, once the body is "
        "deleted",
    )
    redact: Callable[[int, Mapping[str, str], bytes], bytes] | None = option(
        problem_of=validators.callable_object,
        takes="callable(status, headers, body) → body as bytes",
        meaning="removes from a body what must not be recorded; a replay has the redacted body",
    )
    key: Callable[[Any], str | None] | None = option(
        setting="KEY",
        problem_of=validators.callable_or_path,
        takes="callable(request) → str or None, or its dotted path",
        meaning="where the key is, if it is not in the header: a form's field, a webhook's event id. None: it is "
        "in the header only",
        check_id="idempotency.E022",
        hint="A function of the request that returns the key as a str, or None if the request has none of its own.",
    )
    profile: str = option(
        setting="PROFILE",
        default=IETF,
        problem_of=validators.profile,
        is_path=False,
        takes='`"ietf"`, `"stripe"` or `"acp"`',
        meaning="the names and statuses on the wire: the IETF draft's, those of Stripe's API, or those of the "
        "Agentic Commerce Protocol",
        check_id="idempotency.E040",
        hint="The reference page of the wire has a table of the profiles.",
    )


#: The options of an operation, by name.
OPTIONS: Final = options_of(Options)


class Arguments(TypedDict, total=False):
    """The keyword arguments of ``claim()`` and ``@idempotent_task``. None stands for one that is left out."""

    ttl: timedelta | None
    lease: timedelta | None
    body_ttl: timedelta | None
    max_key_age: timedelta | None
    timed_keys: bool | None
    heartbeat: timedelta | None
    idle_timeout: timedelta | None
    in_progress: InProgressAnswer | None
    required: bool | None
    methods: Collection[str] | None
    account: Callable[[Any], str | None] | str | None
    recordable: Callable[[int], bool] | str | None
    headers: Collection[str] | None
    max_body: int | None
    transaction: bool
    recovery: Recovery | Reconcile | None
    command: Callable[..., Any] | None
    rebuild: Callable[[str, Any], Any] | None
    redact: Callable[[int, Mapping[str, str], bytes], bytes] | None


class RequestArguments(Arguments, total=False):
    """The keyword arguments of ``Operation`` and ``@idempotent``: also those that concern a request."""

    key: Callable[[Any], str | None] | str | None
    profile: str | None
