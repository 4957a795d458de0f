"""``Outcome``: what is recorded of a response, and back.

A JSON body is kept as the exact text that was sent. Any other body, and JSON that a database's parser might refuse
or that could be mistaken for an envelope, is kept in an envelope: a JSON object that starts with ``ENVELOPE``.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.http import HttpResponse

from .conf import NEVER_RECORDED_HEADERS
from .exceptions import OutcomeUnreadableError, UnrecordableResponseError

if TYPE_CHECKING:
    from django.http.response import HttpResponseBase

    from .operation import Operation

REPLAYED_HEADER = "Idempotency-Replayed"
#: The status recorded for a block of code that ended well. One that raises is released, not recorded.
DONE = 200
ENVELOPE = '{"$idempotency-envelope":'


@dataclass(frozen=True)
class Outcome:
    """A recorded response.

    ``body`` is JSON text as ``encode_body`` makes it; None where ``reference`` stands in for it.
    """

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: str | None = None
    reference: str | None = None

    @classmethod
    def stored(cls, status: Any, headers: Any, body: Any, reference: Any) -> Outcome:
        """The outcome that a completed record's columns hold, ``headers`` being the parsed JSON.

        :raises OutcomeUnreadableError: they hold something else.
        """
        try:
            pairs = tuple((str(name), str(value)) for name, value in headers)
            return cls(status=int(status), headers=pairs, body=body, reference=reference)
        except (TypeError, ValueError) as error:
            raise OutcomeUnreadableError from error


def outcome_of(response: HttpResponseBase, operation: Operation, reference: str | None = None) -> Outcome:
    """Take down a rendered response as the outcome of ``operation``.

    :param reference: recorded instead of the body where the operation declares ``rebuild``.
    :raises UnrecordableResponseError: the response is a stream, is larger than ``max_body``, or has a body to be
        rebuilt but no reference.
    """
    headers = _recorded_headers(response, operation.headers)
    if reference is not None:
        if operation.rebuild is None:
            raise UnrecordableResponseError(
                f"Operation {operation.name!r} left a reference in its claim but declares no rebuild= to read it with."
            )
        return Outcome(status=response.status_code, headers=headers, reference=reference)
    if getattr(response, "streaming", False) or not isinstance(response, HttpResponse):
        raise UnrecordableResponseError(
            f"Operation {operation.name!r} answered with a streaming response, which has no end to record. Return the "
            f"content whole, or set current_claim().reference and declare rebuild= to answer replays from it."
        )
    content = response.content
    if len(content) > operation.max_body:
        raise UnrecordableResponseError(
            f"Operation {operation.name!r} answered with {len(content)} bytes, and max_body is {operation.max_body}. "
            f"Raise max_body, answer with less, or set current_claim().reference and declare rebuild=."
        )
    return Outcome(
        status=response.status_code,
        headers=headers,
        body=encode_body(content, response.get("Content-Type", "")),
    )


def outcome_of_result(result: Any, operation: Operation) -> Outcome:
    """Take down the result of a block of code that ended well.

    :raises TypeError: it is not JSON.
    """
    try:
        text = json.dumps(result, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"The result of operation {operation.name!r} must be JSON, so that it can be replayed: {error}"
        ) from error
    return Outcome(status=DONE, headers=(("Content-Type", "application/json"),), body=text)


def response_of(outcome: Outcome) -> HttpResponse:
    """The response that ``outcome`` was taken from: status, recorded headers and body, byte for byte.

    :raises OutcomeUnreadableError: the record does not hold what this package wrote.
    """
    try:
        response = HttpResponse(decode_body(outcome.body), status=outcome.status)
        del response["Content-Type"]  # Django's default; the recorded one, or none, is what was sent
        for name, value in outcome.headers:
            response[name] = value
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise OutcomeUnreadableError from error
    return response


def _recorded_headers(response: HttpResponseBase, allowed: Collection[str]) -> tuple[tuple[str, str], ...]:
    kept = _kept(tuple(allowed))
    return tuple((name, value) for name, value in response.items() if name.lower() in kept)


@functools.lru_cache
def _kept(allowed: tuple[str, ...]) -> frozenset[str]:
    return frozenset({*map(str.lower, allowed), "content-type"} - NEVER_RECORDED_HEADERS)


def encode_body(content: bytes, content_type: str) -> str:
    """``content`` as JSON text that ``decode_body`` turns back into the same bytes."""
    if _is_json(content_type):
        try:
            text = content.decode("utf-8")
            _STRICT.decode(text)
        except (ValueError, RecursionError):
            pass  # not JSON that every database takes as it is: the envelope keeps it
        else:
            if not text.startswith(ENVELOPE):
                return text
    try:
        envelope = {"encoding": "utf-8", "data": content.decode("utf-8")}
        if "\x00" in envelope["data"]:
            raise ValueError("a text column holds no NUL")
    except ValueError:
        envelope = {"encoding": "base64", "data": base64.b64encode(content).decode("ascii")}
    return f"{ENVELOPE} {json.dumps(envelope)}}}"


def decode_body(body: str | None) -> bytes:
    if body is None:
        return b""
    if not body.startswith(ENVELOPE):
        return body.encode("utf-8")
    (envelope,) = json.loads(body).values()
    data: str = envelope["data"]
    if envelope["encoding"] == "base64":
        return base64.b64decode(data, validate=True)
    return data.encode(envelope["encoding"])


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


#: Refuses what Python's parser adds to JSON: NaN and the infinities.
_STRICT = json.JSONDecoder(parse_constant=_refuse_constant)


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or media_type.endswith("+json")
