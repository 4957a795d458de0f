"""Parses and checks a request's body. The client is told what is wrong with it, so that bad input is never a 500.

Plain Django views use it directly, Django REST framework through its parser.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from django.http import JsonResponse
from rest_framework.exceptions import ParseError
from rest_framework.parsers import JSONParser


class InvalidPayloadError(ValueError):
    """The client sent an invalid payload. ``errors`` has the messages by field, as in REST framework."""

    def __init__(self, message: str, field: str = "detail") -> None:
        super().__init__(message)
        self.errors: dict[str, Any] = {"detail": message} if field == "detail" else {field: [message]}

    def as_response(self) -> JsonResponse:
        return JsonResponse(self.errors, status=400)


def parse_json(body: bytes) -> Any:
    """Parse ``body`` strictly: UTF-8 without NaN or infinity, with texts that can be encoded as UTF-8 again."""
    try:
        parsed = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        # An escaped half of a surrogate pair is valid JSON, but neither a database nor a response can hold it.
        json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise InvalidPayloadError("The JSON is nested too deeply.") from error
    except ValueError as error:  # malformed, not UTF-8, half a surrogate pair, or a number of thousands of digits
        raise InvalidPayloadError("The body is not valid JSON.") from error
    return parsed


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse ``body``, which must be one JSON object."""
    parsed = parse_json(body)
    if not isinstance(parsed, dict):
        raise InvalidPayloadError("The body must be a JSON object.")
    return parsed


def text(payload: Mapping[str, Any], field: str, *, max_length: int, default: str | None = None) -> str:
    """Return a text of ``payload``, or ``default`` if it is absent and has one."""
    value = payload.get(field, default)
    if not isinstance(value, str) or (not value and default is None):
        raise InvalidPayloadError("This field is required and must be a text that is not empty.", field)
    if len(value) > max_length:
        raise InvalidPayloadError(f"Ensure this field has no more than {max_length} characters.", field)
    if "\x00" in value:
        raise InvalidPayloadError("Null characters are not allowed.", field)
    return value


def whole_number(payload: Mapping[str, Any], field: str, *, minimum: int, maximum: int) -> int:
    """Return an integer of ``payload`` within bounds. ``true`` and ``1.0`` are refused."""
    value = payload.get(field)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidPayloadError("A valid integer is required.", field)
    if not minimum <= value <= maximum:
        raise InvalidPayloadError(f"Ensure this value is between {minimum} and {maximum}.", field)
    return value


def one_of(payload: Mapping[str, Any], field: str, choices: Collection[str], *, default: str) -> str:
    """Return one of the texts that the field may be, or ``default`` if it is absent."""
    value = payload.get(field, default)
    if value != default and (not isinstance(value, str) or value not in choices):
        raise InvalidPayloadError(f"Must be one of {', '.join(choices)}.", field)
    return str(value)


class StrictJSONParser(JSONParser):
    """REST framework's JSON parser. It refuses bodies that would otherwise lead to a server error."""

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> Any:
        try:
            return parse_json(stream.read())
        except InvalidPayloadError as error:
            raise ParseError(str(error)) from error
