"""The requirements of each profile. Every expectation of a case is defined here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from .wire import Answer


class Level(Enum):
    """How binding a rule is. A server that breaks a MUST fails. A server that breaks a SHOULD deviates."""

    MUST = "MUST"
    SHOULD = "SHOULD"


@dataclass(frozen=True)
class Rule:
    """The source of a requirement."""

    level: Level
    source: str


class Expected(Enum):
    """The expected treatment of a request, where profiles differ."""

    #: The first answer is recorded, and a retry gets it.
    REPLAYED = "replayed"
    #: It runs as a new request.
    FRESH = "fresh"
    #: It is refused, and has no effect.
    REFUSED = "refused"
    #: The profile doesn't specify it.
    UNSPECIFIED = "unspecified"


@dataclass(frozen=True)
class Refusal:
    """An expected error response."""

    status: int
    #: The machine-readable reason. None accepts any.
    code: str | None = None


@dataclass(frozen=True)
class KeyForm:
    """A form of the key on the wire."""

    name: str
    #: One header field each. ``{key}`` is replaced by a fresh key.
    values: tuple[bytes, ...]
    #: None: the server may accept or refuse it.
    is_valid: bool | None
    rule: Rule
    #: The length of the key, in characters.
    length: int = 36


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A contract between clients and servers."""

    name: str
    document: str
    header: str = "Idempotency-Key"
    #: Whether keys are sent as RFC 8941 strings, in double quotes.
    quoted: bool
    #: The header field that only a replay has, and its value.
    marker: tuple[str, str] | None
    #: Whether every response repeats the key.
    echoed: bool = False
    missing: Refusal | None
    reused: Refusal
    in_progress: Refusal
    #: The status that ends retries after a crash if the server can't know whether the operation ran. None if it can.
    unknown: int | None = None
    #: Returns a description of the mistake in the form of a refusal, or None.
    complaint: Callable[[Answer, Refusal], str | None]
    client_error: Expected = Expected.REPLAYED
    server_error: Expected
    throttled: Expected = Expected.FRESH
    unavailable: Expected = Expected.FRESH
    other_path: Expected
    #: The same JSON with its members in another order.
    reordered: Expected = Expected.UNSPECIFIED
    keys: tuple[KeyForm, ...]
    #: The rules by the names of cases. A case without an entry has its default rule.
    rules: Mapping[str, Rule] = field(default_factory=dict)

    def is_result(self, answer: Answer) -> bool:
        """Whether the answer reports that the operation ran."""
        return answer.succeeded and answer.status != self.in_progress.status

    def is_unknown(self, answer: Answer) -> bool:
        """Whether the outcome is unknown until an operator decides. Without Retry-After, retries should end."""
        return answer.status == self.unknown and answer.field("Retry-After") is None


def _must(source: str) -> Rule:
    return Rule(Level.MUST, source)


def _should(source: str) -> Rule:
    return Rule(Level.SHOULD, source)


def _json_object(answer: Answer) -> dict[str, Any]:
    try:
        value = json.loads(answer.body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _problem_complaint(answer: Answer, refusal: Refusal) -> str | None:
    """Require an RFC 9457 problem, as in the draft's examples, or a ``Link`` to the documentation."""
    if "describedby" in (answer.field("Link") or ""):
        return None
    if (answer.field("Content-Type") or "").partition(";")[0].strip() != "application/problem+json":
        return "it is neither application/problem+json nor has a Link with rel=describedby"
    problem = _json_object(answer)
    if not isinstance(problem.get("title"), str):
        return "the problem has no title"
    if problem.get("status", answer.status) != answer.status:
        return "the problem's status is not the response's"
    if refusal.code is not None and problem.get("code") != refusal.code:
        return f"its code is {problem.get('code')!r}, not {refusal.code!r}"
    return None


def _stripe_complaint(answer: Answer, refusal: Refusal) -> str | None:
    error = _json_object(answer).get("error")
    if not isinstance(error, dict) or not {"type", "message"} <= set(error):
        return "it is not an error object with type and message"
    if refusal.code is not None and refusal.code not in (error.get("type"), error.get("code")):
        return f"neither its type nor its code is {refusal.code!r}"
    return None


def _acp_complaint(answer: Answer, refusal: Refusal) -> str | None:
    error = _json_object(answer)
    if error.get("type") != "invalid_request" or not isinstance(error.get("message"), str):
        return "it is not a flat error with type invalid_request and a message"
    if refusal.code is not None and error.get("code") != refusal.code:
        return f"its code is {error.get('code')!r}, not {refusal.code!r}"
    return None


def _no_complaint(answer: Answer, refusal: Refusal) -> str | None:
    return None


#: The source of the rules that every profile shares.
SUITE = "this suite's promise"
PROMISE = _must(f"{SUITE}: one operation, at most one effect, and its own result")

_KEY = b"{key}"
_SENDABLE = _must(f"{SUITE}: a client's malformed key doesn't break the server")
_STRING = _should("draft section 2.1: an Item of RFC 8941, which is a String")

#: Keys that HTTP forbids. The server may refuse or misread them, but must keep the promise.
_UNSENDABLE = (
    KeyForm("NUL", (b"a\x00" + _KEY,), None, _SENDABLE),
    KeyForm("line feed", (b"a\n" + _KEY,), None, _SENDABLE),
    KeyForm("DEL", (b"a\x7f" + _KEY,), None, _SENDABLE),
)

IETF = Profile(
    name="ietf",
    document="https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/",
    quoted=True,
    marker=None,
    missing=Refusal(400),
    reused=Refusal(422),
    in_progress=Refusal(409),
    complaint=_problem_complaint,
    server_error=Expected.UNSPECIFIED,
    other_path=Expected.UNSPECIFIED,
    keys=(
        KeyForm("quoted", (b'"' + _KEY + b'"',), True, _must("draft section 2.1")),
        KeyForm("bare", (_KEY,), False, _STRING),
        KeyForm("empty", (b"",), False, _STRING),
        KeyForm("empty string", (b'""',), None, _STRING),
        KeyForm("unterminated", (b'"' + _KEY,), False, _STRING),
        KeyForm("not ASCII", (b'"\xc3\xa9' + _KEY + b'"',), False, _STRING),
        KeyForm("two fields", (b'"a' + _KEY + b'"', b'"b' + _KEY + b'"'), False, _STRING),
        *_UNSENDABLE,
    ),
    rules={
        "missing-key": _should("draft section 2.7"),
        "other-payload": _should("draft section 2.7"),
        "other-payload-in-flight": _should("draft section 2.7"),
        "in-progress": _should("draft section 2.7"),
        "replay-is-equal": _should("draft section 2.6"),
        "client-error": _should("draft section 2.6: success or an error"),
        "other-account": _should("draft section 5: a composite key"),
        "other-account-in-flight": _should("draft section 5: a composite key"),
        "other-account-after-a-refusal": _should("draft section 5: a composite key"),
        "other-path": _should("draft section 5: a composite key"),
    },
)

_STRIPE_DOCUMENT = "https://docs.stripe.com/api/idempotent_requests"
_STRIPE = _must(_STRIPE_DOCUMENT)
_STRIPE_ERRORS = _must("https://docs.stripe.com/error-low-level")

STRIPE = Profile(
    name="stripe",
    document=_STRIPE_DOCUMENT,
    quoted=False,
    marker=("Idempotent-Replayed", "true"),
    missing=None,
    reused=Refusal(400, "idempotency_error"),
    in_progress=Refusal(409, "idempotency_key_in_use"),
    complaint=_stripe_complaint,
    server_error=Expected.REPLAYED,
    unavailable=Expected.UNSPECIFIED,
    other_path=Expected.REFUSED,
    keys=(
        KeyForm("bare", (_KEY,), True, _STRIPE),
        KeyForm("255 characters", (_KEY,), True, _STRIPE, length=255),
        KeyForm("256 characters", (_KEY,), False, _STRIPE, length=256),
        KeyForm("two fields", (b"a" + _KEY, b"b" + _KEY), None, _SENDABLE),
        *_UNSENDABLE,
    ),
    rules={
        "missing-key": _STRIPE,
        "other-payload": _STRIPE,
        "in-progress": _STRIPE_ERRORS,
        "replay-is-equal": _STRIPE,
        "replay-is-marked": _STRIPE_ERRORS,
        "client-error": _STRIPE,
        "server-error": _STRIPE,
        "other-path": _must("https://docs.stripe.com/error-handling: idempotency_error"),
        "expiry": _STRIPE,
    },
)


def _acp(section: str, level: Level = Level.MUST) -> Rule:
    return Rule(level, f"ACP 2026-04-17, agentic checkout, section {section}")


ACP = Profile(
    name="acp",
    document="https://github.com/agentic-commerce-protocol/agentic-commerce-protocol",
    quoted=False,
    marker=("Idempotent-Replayed", "true"),
    echoed=True,
    missing=Refusal(400, "idempotency_key_required"),
    reused=Refusal(422, "idempotency_conflict"),
    in_progress=Refusal(409, "idempotency_in_flight"),
    complaint=_acp_complaint,
    server_error=Expected.FRESH,
    other_path=Expected.FRESH,
    reordered=Expected.REPLAYED,
    keys=(
        KeyForm("bare", (_KEY,), True, _acp("6.1")),
        KeyForm("255 characters", (_KEY,), True, _acp("6.1"), length=255),
        KeyForm("256 characters", (_KEY,), False, _acp("6.1"), length=256),
        KeyForm("empty", (b"",), False, _acp("6.1")),
        KeyForm("two fields", (b"a" + _KEY, b"b" + _KEY), None, _SENDABLE),
        *_UNSENDABLE,
    ),
    rules={
        "missing-key": _acp("6.1"),
        "other-account": _acp("6.1"),
        "other-account-in-flight": _acp("6.1"),
        "other-account-after-a-refusal": _acp("6.1"),
        "other-path": _acp("6.1"),
        "reordered-payload": _acp("6.2"),
        "replay-is-equal": _acp("6.3"),
        "replay-is-marked": _acp("6.3", Level.SHOULD),
        "sequential": _acp("6.3"),
        "other-payload": _acp("6.4"),
        "in-progress": _acp("6.4"),
        "retry-after": _acp("6.4", Level.SHOULD),
        "server-error": _acp("6.5"),
        "expiry": _acp("6.6"),
        "echo": _acp("3.1"),
    },
)

PROFILES = {profile.name: profile for profile in (IETF, STRIPE, ACP)}

_DECLARED = _must(f"{SUITE}: as the server documents")
#: The forms of the key for a server that declares keys without quotes.
_BARE = (
    KeyForm("bare", (_KEY,), True, _DECLARED),
    KeyForm("empty", (b"",), False, _DECLARED),
    KeyForm("two fields", (b"a" + _KEY, b"b" + _KEY), None, _SENDABLE),
    *_UNSENDABLE,
)


#: The names that ``declare`` accepts.
DECLARABLE = (
    *("header", "marker", "quoted", "missing", "reused", "in-progress", "unknown", "errors"),
    *("client-error", "server-error", "throttled", "unavailable", "other-path"),
)


def declare(profile: Profile, declaration: str) -> Profile:
    """Return the profile with one expectation changed to the server's documented behaviour.

    :param declaration: ``name=value``. Names: ``header`` and ``marker`` (names of header fields), ``quoted`` (yes or
        no), ``missing``, ``reused`` and ``in-progress`` (a status; ``missing=none``: keys are optional), ``unknown``
        (the status that ends retries if the server can't know whether an operation ran before a crash), ``errors=any``
        (refusals may have any form), ``client-error``, ``server-error``, ``throttled``, ``unavailable`` and
        ``other-path`` (an ``Expected``).
    :raises ValueError: the name is unknown, or the value is invalid for it.
    """
    name, _, value = declaration.partition("=")
    changes: dict[str, Any] = {}
    if declaration == "missing=none":
        changes["missing"] = None
    elif declaration == "errors=any":
        changes["complaint"] = _no_complaint
    elif name == "header" and value:
        changes["header"] = value
    elif name == "marker" and value:
        changes["marker"] = (value, "true")
    elif name == "quoted" and value in ("yes", "no"):
        changes["quoted"] = value == "yes"
        if changes["quoted"] is not profile.quoted:
            changes["keys"] = IETF.keys if changes["quoted"] else _BARE
    elif name in ("missing", "reused", "in-progress") and value.isdecimal():
        changes[name.replace("-", "_")] = Refusal(int(value))
    elif name == "unknown" and value.isdecimal():
        changes[name] = int(value)
    elif name in ("client-error", "server-error", "throttled", "unavailable", "other-path"):
        changes[name.replace("-", "_")] = Expected(value)
    else:
        raise ValueError(f"{declaration!r} is not a valid declaration")
    return replace(profile, **changes)
