"""``IdempotencyErrorMiddleware``: turns errors of ``claim()`` that a view does not handle into responses."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.utils.deprecation import MiddlewareMixin

from ..exceptions import IdempotencyError
from .attempts import is_crash
from .problems import response_for


class IdempotencyErrorMiddleware(MiddlewareMixin):
    """Turn an ``IdempotencyError`` of a view into a response with its status, code and headers, instead of a 500.

    It is for views that call ``claim()`` themselves: plain views, async views, and those of a framework that passes
    exceptions on to Django. It does nothing for a view under ``@idempotent``, because an error of a ``claim()`` block
    inside of it is no answer to the request's own key.
    """

    def process_exception(self, request: HttpRequest, exception: Exception) -> Any:
        if not isinstance(exception, IdempotencyError) or is_crash(request, exception):
            return None
        return response_for(exception, request)
