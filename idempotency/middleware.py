"""``IdempotencyMiddleware``: the key's status in every response, and responses to errors of ``claim()``."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.deprecation import MiddlewareMixin

from .exceptions import IdempotencyError
from .http.adapter import handlers_of
from .http.exchange import HEADERS, is_crash
from .http.key_sources import FromHeader, has_key_header
from .http.problems import KEY_STATUSES, STATUS_HEADER, response_for
from .identity import keys
from .operation import Operation

__all__ = ["IdempotencyMiddleware"]


class IdempotencyMiddleware(MiddlewareMixin):
    """Add the key's status to every response to a request with a key, and answer errors of ``claim()``.

    - If a protected handler crashes, Django's 500 gets the headers that every other response has.
    - If the route doesn't use keys, the response has ``Idempotency-Status: ignored``, so the client learns that its key
      protects nothing. A view that reads the key itself sets this header itself.
    - An ``IdempotencyError`` of a view that calls ``claim()`` becomes a response with its status, code and headers. In
      a view under ``@idempotent`` it remains a 500, because it doesn't concern the key of the request.
    """

    def process_exception(self, request: HttpRequest, exception: Exception) -> Any:
        if not isinstance(exception, IdempotencyError) or is_crash(request, exception):
            return None
        response = response_for(exception, request)
        response[STATUS_HEADER] = KEY_STATUSES.get(exception.code, "unknown")
        return response

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        headers = getattr(request, HEADERS, None) or _headers_without_exchange(request, response.status_code)
        for name, value in headers.items():
            response.setdefault(name, value)
        return response


def _headers_without_exchange(request: HttpRequest, status: int) -> dict[str, str]:
    """The headers of a response for which no protected handler was called.

    The route doesn't use keys, or a check above the handler, such as a throttle, refused without looking up the record.
    A 405, or the 404 of an unknown URL, gets no status: the key may have been used with another method.
    """
    match, method = request.resolver_match, request.method or ""
    if status == HTTPStatus.METHOD_NOT_ALLOWED or match is None or not has_key_header(request.META):
        return {}
    routed = (each for each in handlers_of(match.func) if method in each.methods or not each.methods)
    if any(_takes_key(request, each.operation_for(method)) for each in routed):
        return {STATUS_HEADER: "unknown"}
    return {STATUS_HEADER: "ignored"} if keys.META_NAME in request.META else {}


def _takes_key(request: HttpRequest, operation: Operation | None) -> bool:
    """Whether the request has a key for the operation, in the standard header or in the operation's header."""
    if operation is None or keys.META_NAME in request.META:
        return operation is not None
    own = operation.policy.key
    return isinstance(own, FromHeader) and own(request) is not None
