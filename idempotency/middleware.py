"""``IdempotencyMiddleware``: the key's status in every response, and responses to errors of ``claim()``."""

from __future__ import annotations

import logging
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.deprecation import MiddlewareMixin

from .exceptions import IdempotencyError
from .http.adapter import handlers_of
from .http.key_headers import STATUS_HEADER, Reached, answered, key_status
from .http.key_sources import FromHeader, has_key_header
from .http.problems import response_for
from .identity import keys
from .operation import Operation

__all__ = ["IdempotencyMiddleware"]

logger: Final = logging.getLogger("idempotency")


class IdempotencyMiddleware(MiddlewareMixin):
    """Add the key's status to every response to a request with a key, and answer errors of ``claim()``.

    - If a protected handler crashes, Django's 500 gets the headers that every other response has.
    - If the route doesn't use keys, or the view succeeds without calling its protected handler, the response has
      ``Idempotency-Status: ignored``, so the client learns that its key protects nothing. A view that reads the key
      itself sets this header itself.
    - An ``IdempotencyError`` of a view that calls ``claim()`` becomes a response with its status, code and headers. In
      a view under ``@idempotent`` it remains a 500, because it doesn't concern the key of the request.
    """

    def process_exception(self, request: HttpRequest, exception: Exception) -> Any:
        found = answered(request)
        if not isinstance(exception, IdempotencyError) or (found is not None and found.crash is exception):
            return None
        response = response_for(exception, request)
        response[STATUS_HEADER] = key_status(Reached.NOTHING, exception.code)
        return response

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        found = answered(request)
        headers = _headers_without_exchange(request, response.status_code) if found is None else found.headers
        for name, value in headers.items():
            response.setdefault(name, value)
        return response


def _headers_without_exchange(request: HttpRequest, status: int) -> dict[str, str]:
    """The headers of a response for which no protected handler was called.

    The route doesn't use keys, or a check above the handler, such as a throttle, refused without looking up the record.
    If such a response is a success, something runs instead of the protected handler. A 405, or the 404 of an unknown
    URL, gets no status: the key may have been used with another method.
    """
    match, method = request.resolver_match, request.method or ""
    if status == HTTPStatus.METHOD_NOT_ALLOWED or match is None or not has_key_header(request.META):
        return {}
    routed = (each for each in handlers_of(match.func) if method in each.methods or not each.methods)
    operations = [each.operation_for(method) for each in routed]
    operation = next((each for each in operations if _takes_key(request, each)), None)
    if operation is None and keys.META_NAME not in request.META:
        return {}
    if operation is not None and not 200 <= status < 300:
        return {STATUS_HEADER: key_status(Reached.NOTHING)}
    if operation is not None:
        _report_bypass(operation.name, match.route or "")
    return {STATUS_HEADER: key_status(Reached.NO_PROTECTION)}


@lru_cache(maxsize=1000)  # once for each route
def _report_bypass(operation: str, route: str) -> None:
    logger.error(
        "Route %r is declared under operation %r, but a request with a key succeeded without it, so it runs again at "
        "each retry. Something in the view calls another handler: for example, its dispatch() has a table of handlers, "
        "or its setup() replaces one. Put @idempotent on that handler, or let dispatch() call the class's handlers.",
        route,
        operation,
    )


def _takes_key(request: HttpRequest, operation: Operation | None) -> bool:
    """Whether the request has a key for the operation, in the standard header or in the operation's header."""
    if operation is None or keys.META_NAME in request.META:
        return operation is not None
    own = operation.policy.key
    return isinstance(own, FromHeader) and own(request) is not None
