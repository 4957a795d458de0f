"""Describes a protected operation in an OpenAPI 3 document: the request's header, the responses, and their headers.

The functions change plain dictionaries and need no schema generator. The project's descriptions are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .. import exceptions
from ..exceptions import IdempotencyError, InProgressError, UnavailableError
from ..http.key_headers import RETENTION_HEADER, STATUS_HEADER
from ..http.problems import PROFILES
from ..identity import keys
from ..operation import Operation, Policy
from ..options.values import ACCEPTED, ACP, IETF, STRIPE, Attach

_CODE = {"type": "string", "description": "Tells a client what to do. It does not change between releases."}


def _object(description: str, **properties: Any) -> dict[str, Any]:
    """The schema of an object with required properties."""
    return {"type": "object", "description": description, "properties": properties, "required": [*properties]}


_FLAT = _object("An error.", type={"type": "string"}, code=_CODE, message={"type": "string"})

#: For each profile, the name and the schema of the component for problems.
PROBLEMS: dict[str, tuple[str, dict[str, Any]]] = {
    IETF: (
        "IdempotencyProblem",
        _object(
            "A problem of RFC 9457.",
            type={"type": "string", "format": "uri"},
            title={"type": "string"},
            status={"type": "integer"},
            detail={"type": "string"},
            code=_CODE,
            retryable={"type": "boolean", "description": "Whether a retry with the same key may get another answer."},
        ),
    ),
    STRIPE: ("IdempotencyErrorObject", _object("An error, enclosed.", error=_FLAT)),
    ACP: ("IdempotencyError", _FLAT),
}

#: The header's value: a bare key, or a structured-field string with escaped quotes and backslashes.
KEY_SCHEMA: dict[str, Any] = {
    "type": "string",
    "minLength": 1,
    "maxLength": 2 * keys.MAX_LENGTH + 2,
    # As in keys.py.
    "pattern": rf'^(?:[!#-+\--:<-~]{{1,{keys.MAX_LENGTH}}}|"(?:[!#-\[\]-~]|\\["\\]){{1,{keys.MAX_LENGTH}}}")$',
}

KEY_DESCRIPTION = (
    f"One unique value for each logical operation, the same at each retry: 1 to {keys.MAX_LENGTH} visible ASCII "
    f"characters, bare or in double quotes. A random UUID is enough."
)

#: The statuses of a key, including refusals, because a refusal may have the HTTP status of an outcome.
KEY_STATUS_VALUES = ["executed", "replayed", "recorded", "in-progress", "reused", "not-recorded", "unknown"]


def _header(description: str, **schema: Any) -> dict[str, Any]:
    return {"description": description, "schema": schema}


def _retry_after() -> dict[str, Any]:
    return _header("Seconds after which a retry with the same key makes sense.", type="integer", minimum=0)


def key_parameter(operation: Operation | None) -> dict[str, Any]:
    """The header of an operation, or of a ``KeyStatusView`` if it is None."""
    if operation is None:
        description, required = "The key to look up, as the request sent it.", True
    else:
        description, required = KEY_DESCRIPTION, operation.policy.key_required and operation.policy.key is None
    schema = dict(KEY_SCHEMA)
    return {"name": keys.HEADER, "in": "header", "required": required, "description": description, "schema": schema}


def add_responses(operation: Operation, responses: dict[Any, Any], content: dict[str, Any] | None) -> None:
    """Add this package's responses to the described ``responses`` of an operation.

    A response that is already described only gets the missing content types and headers.

    :param content: the content of this package's errors, or None if unknown.
    """
    described = {str(status): response for status, response in responses.items()}
    for status, response in _answers(operation, content):
        if status in described:
            _complete(described[status], response)
        else:
            responses[status] = response
    for status, response in described.items():
        if status.isdigit() and operation.policy.recordable(int(status)):
            _complete(response, {"headers": _headers_of_outcome(operation.policy)})


def _answers(operation: Operation, content: dict[str, Any] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """This package's responses, by status."""
    profile = PROFILES[operation.policy.profile]
    by_status: dict[int, list[type[IdempotencyError]]] = {}
    for error in _errors(operation.policy):
        by_status.setdefault(profile.answer_to(error).status, []).append(error)
    for status, errors in sorted(by_status.items()):
        titles = [f"{error.title} (`{profile.answer_to(error).code}`)" for error in errors]
        answer: dict[str, Any] = {"description": "; ".join(titles)}
        if content is not None:
            answer["content"] = dict(content)
        if {InProgressError, UnavailableError} & set(errors):
            answer["headers"] = {"Retry-After": _retry_after()}
        yield str(status), answer
    in_progress = operation.policy.in_progress
    if in_progress is ACCEPTED or isinstance(in_progress, Attach):
        headers = {"Retry-After": _retry_after()}
        if isinstance(in_progress, Attach):
            headers["Location"] = _header("Where the job is.", type="string", format="uri-reference")
        yield "202", {"description": "A request with this key is still being processed", "headers": headers}


def _errors(policy: Policy) -> list[type[IdempotencyError]]:
    """The errors that the operation may respond with."""
    kinds = (*exceptions.RequestError.__subclasses__(), *exceptions.DuplicateError.__subclasses__(), UnavailableError)
    can_happen: dict[type[IdempotencyError], bool] = {
        exceptions.KeyMissingError: policy.key_required,
        exceptions.KeyExpiredError: policy.max_key_age is not None,
        exceptions.BodyGoneError: policy.body_retention is not None,
    }
    # Exclude subclasses that the project defines.
    return [error for error in kinds if error.__module__ == exceptions.__name__ and can_happen.get(error, True)]


def _headers_of_outcome(policy: Policy) -> dict[str, Any]:
    values = KEY_STATUS_VALUES if policy.key_required else [*KEY_STATUS_VALUES, "ignored"]
    return {
        keys.HEADER: _header("The key, as it was sent.", type="string"),
        RETENTION_HEADER: _header(
            "The number of seconds for which an outcome is kept and a retry is recognised.", type="integer", minimum=0
        ),
        STATUS_HEADER: _header("The status of the key.", type="string", enum=values),
        PROFILES[policy.profile].replayed: _header(
            "Present if this is the recorded outcome of an earlier request.", type="string", enum=["true"]
        ),
    }


def _complete(described: dict[str, Any], addition: dict[str, Any]) -> None:
    """Add missing parts, unless the response is a reference."""
    if "$ref" in described:
        return
    for part in ("content", "headers"):
        if part in addition:
            described[part] = {**addition[part], **described.get(part, {})}
