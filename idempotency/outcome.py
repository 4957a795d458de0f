"""The ``Outcome`` of an attempt, made from a response, or the reason for its failure."""

from __future__ import annotations

import functools
import json
import logging
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from django.conf import settings as django_settings
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.utils.datastructures import CaseInsensitiveMapping

from .bodies import encode_body
from .conf import settings
from .exceptions import OutcomeUnreadableError, UnrecordableResponseError
from .operation import Policy
from .options.values import NEVER_RECORDED_HEADERS, Attach

logger: Final = logging.getLogger("idempotency")

#: Headers that servers, middleware, DRF and this package set on replays, too.
REGENERATED_HEADERS = NEVER_RECORDED_HEADERS | {
    *("allow", "content-length", "date", "server"),
    *("idempotency-key", "idempotency-retention", "idempotency-status"),
}
#: The recorded status of a ``claim()`` block. A block that raises an error is released, not recorded.
DONE = 200


@dataclass(frozen=True)
class Outcome:
    """A recorded response. Its ``repr`` shows only the status, because crash reports show the ``repr``.

    ``body`` is JSON text from ``encode_body``, or None if ``reference`` is recorded instead.
    """

    status: int
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    body: str | None = field(default=None, repr=False)
    reference: str | None = field(default=None, repr=False)
    #: How long the body is kept, if shorter than the record. In this case both a body and a reference may be recorded.
    body_retention: timedelta | None = field(default=None, compare=False)

    @classmethod
    def stored(cls, status: Any, headers: Any, body: Any, reference: Any) -> Outcome:
        """Make an outcome from the columns of a completed record. ``headers`` is parsed JSON.

        :raises OutcomeUnreadableError: the columns do not hold an outcome.
        """
        try:
            pairs = tuple((str(name), str(value)) for name, value in headers)
            return cls(status=int(status), headers=pairs, body=body, reference=reference)
        except (TypeError, ValueError) as error:
            raise OutcomeUnreadableError from error


def outcome_of(response: HttpResponseBase, policy: Policy, reference: str | None = None) -> Outcome:
    """Make an operation's outcome from a rendered response.

    :param reference: recorded instead of the body or, with ``body_retention``, in addition to it. Needs ``rebuild``.
    :raises UnrecordableResponseError: the response is a stream or larger than ``max_response_body``, there is a
        reference but no ``rebuild``, or ``redact`` fails.
    """
    headers = _recorded_headers(response, policy)
    whole = response if isinstance(response, HttpResponse) and not getattr(response, "streaming", False) else None
    if reference is not None:
        if policy.rebuild is None:
            raise UnrecordableResponseError(
                f"{policy.operation} set a reference in its claim but declares no rebuild= to read it."
            )
        # A duplicate that attaches to a job needs the job's current state.
        keeps_body = policy.body_retention is not None and not isinstance(policy.in_progress, Attach)
        if not keeps_body or whole is None or len(whole.content) > policy.max_response_body:
            return Outcome(response.status_code, headers, reference=reference, body_retention=policy.body_retention)
    if whole is None:
        raise UnrecordableResponseError(
            f"{policy.operation} returned a streaming response, which can't be recorded. Return the whole "
            f"content, or set current_claim().reference and declare rebuild= to answer replays from it."
        )
    # Not in a local variable before it is redacted, because a crash report would show it.
    content = whole.content if policy.redact is None else _redacted(whole.content, whole.status_code, headers, policy)
    if len(content) > policy.max_response_body:
        raise UnrecordableResponseError(
            f"{policy.operation} returned {len(content)} bytes, but max_response_body is {policy.max_response_body}. "
            f"Raise max_response_body, return less, or set current_claim().reference and declare rebuild=."
        )
    return Outcome(
        status=response.status_code,
        headers=headers,
        body=encode_body(content, response.headers.get("Content-Type", "")),
        reference=reference,
        body_retention=policy.body_retention,
    )


def outcome_of_result(result: Any, policy: Policy) -> Outcome:
    """Make the outcome from the result of a ``claim()`` block or a task.

    :raises TypeError: the result, before or after ``redact``, is not JSON.
    :raises UnrecordableResponseError: the result is larger than ``max_response_body``, or ``redact`` fails.
    """
    headers = (("Content-Type", "application/json"),)
    text = json_text(
        result, f"The result of operation {policy.operation.name!r} must be JSON, so that it can be replayed"
    )
    content = _redacted(text.encode("utf-8"), DONE, headers, policy)
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        # Not chained, because the parser's error holds the content.
        raise TypeError(f"redact= of operation {policy.operation.name!r} must turn a result into JSON.") from None
    if len(content) > policy.max_response_body:
        raise UnrecordableResponseError(
            f"The result of {policy.operation} has {len(content)} bytes as JSON, but max_response_body is "
            f"{policy.max_response_body}. Raise max_response_body, or return less, such as a primary key."
        )
    body = encode_body(content, "application/json")
    return Outcome(status=DONE, headers=headers, body=body, body_retention=policy.body_retention)


def json_text(value: object, demand: str) -> str:
    """:raises TypeError: the value is not JSON. The message begins with ``demand``."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{demand}: {error}") from error


def _redacted(content: bytes, status: int, headers: tuple[tuple[str, str], ...], policy: Policy) -> bytes:
    """The content to record.

    :raises UnrecordableResponseError: ``redact`` raises an error, or doesn't return bytes. Then nothing is recorded.
    """
    if policy.redact is None or not content:
        return content
    try:
        redacted: object = policy.redact(status, CaseInsensitiveMapping(dict(headers)), content)
    except Exception as error:  # noqa: BLE001 - it is reported without its message, which may quote the body
        frame = error.__traceback__ and error.__traceback__.tb_next
        place = f" in line {frame.tb_lineno} of {frame.tb_frame.f_code.co_filename}" if frame else ""
        problem = f"raised {type(error).__name__}{place}, so its body is not recorded"
    else:
        if isinstance(redacted, bytes):
            return redacted
        problem = f"must return bytes, not {type(redacted).__name__}"
        del redacted
    # Raised outside of the except block and without the body, because crash reports show messages and local variables.
    del content
    raise UnrecordableResponseError(f"redact= of operation {policy.operation.name!r} {problem}.")


def _recorded_headers(response: HttpResponseBase, policy: Policy) -> tuple[tuple[str, str], ...]:
    names, prefixes = _recordable_names(tuple(policy.recorded_headers))
    recorded = {
        header: response.headers[header]
        for header in response.headers
        if (name := header.lower()) in names or (name.startswith(prefixes) and name not in NEVER_RECORDED_HEADERS)
    }
    if django_settings.DEBUG:
        for header in response.headers:
            if header not in recorded and header.lower() not in REGENERATED_HEADERS:
                _warn_of_dropped_header(policy.operation.name, header)
    return tuple(recorded.items())


@functools.lru_cache
def _recordable_names(headers: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """The recorded headers in lower case: full names, and the prefixes of patterns such as ``X-*``."""
    names = frozenset({*map(str.lower, headers), "content-language", "content-type"})
    return names - NEVER_RECORDED_HEADERS, tuple(name.removesuffix("*") for name in names if name.endswith("*"))


@functools.lru_cache  # warns once about each header
def _warn_of_dropped_header(operation: str, header: str) -> None:
    logger.warning(
        "Operation %r: the handler sets %s, which is not recorded, so replays lack it. List it in recorded_headers= if "
        "it belongs to the outcome. Otherwise set it above @idempotent or in a middleware.",
        operation,
        header,
    )


#: A reason is truncated to this length.
MAX_REASON: Final = 2000  # characters


def reason_of(error: BaseException) -> str:
    """The class and message of an error. Never raises, even if the error's ``__str__`` does."""
    name = type(error).__name__
    try:
        text = f"{name}: {error}"
    except Exception:  # noqa: BLE001 - the project's class may raise anything
        text = name
    text = text.replace("\x00", "\ufffd")  # PostgreSQL's text can't hold NUL
    return text.encode("utf-8", "replace").decode()[:MAX_REASON]


def recorded_reason(error: BaseException) -> str:
    """The reason to record. If bodies are encrypted, only the class, because the message may quote a body."""
    return reason_of(error) if settings().encryption_keys is None else type(error).__name__
