"""``IdempotencyMiddleware``: the status of the key in every response, and answers to errors of ``claim()``."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.deprecation import MiddlewareMixin

from ..exceptions import IdempotencyError
from ..identity import keys
from ..operation import Operation
from .adapter import handlers_of
from .exchange import HEADERS, is_crash
from .key_sources import KEY_HEADERS, FromHeader
from .problems import KEY_STATUSES, STATUS_HEADER, response_for


class IdempotencyMiddleware(MiddlewareMixin):
    """Say in every response to a request with a key what has become of the key, and answer errors of ``claim()``.

    - If a protected handler crashes, Django's 500 gets the headers that every other response has.
    - If the route takes no key, the response has ``Idempotency-Status: ignored``. So a client learns that its key
      protects nothing. A view that reads the header itself sets this header itself.
    - An ``IdempotencyError`` of a view that calls ``claim()`` becomes a response with its status, code and headers,
      instead of a 500. In a view under ``@idempotent`` it does not, because an error of a ``claim()`` block inside of
      it is no answer to the request's own key.
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
    """The headers of a response to which no protected handler has come: it takes no key, or something above refused.

    A refusal above, such as a throttle's, has not looked up the record, so it does not know what became of the key. A
    405 says nothing, as the 404 of an unknown URL does: the key may have been used with another method.
    """
    if status == HTTPStatus.METHOD_NOT_ALLOWED or request.resolver_match is None:
        return {}
    if KEY_HEADERS.isdisjoint(request.META):
        return {}
    method = request.method or ""
    takes_key = any(
        _takes_key(request, routed.operation_for(method))
        for routed in handlers_of(request.resolver_match.func)
        if method in routed.methods or not routed.methods
    )
    if not takes_key and keys.META_NAME not in request.META:
        return {}
    return {STATUS_HEADER: "unknown" if takes_key else "ignored"}


def _takes_key(request: HttpRequest, operation: Operation | None) -> bool:
    """Whether the request has a key of the operation, in the standard header or in the operation's own."""
    if operation is None or keys.META_NAME in request.META:
        return operation is not None
    own = operation.policy.key
    return isinstance(own, FromHeader) and own(request) is not None
