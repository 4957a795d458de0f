"""``IdempotencyErrorMiddleware``: answers to the errors of ``claim()`` in views that handle none."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.utils.deprecation import MiddlewareMixin

from ..exceptions import IdempotencyError
from .attempts import is_crash
from .problems import response_for


class IdempotencyErrorMiddleware(MiddlewareMixin):
    """Answer an ``IdempotencyError`` that a view raised with its status, code and headers, instead of with 500.

    For views that call ``claim()`` themselves: plain ones, async ones, and those of a framework that lets exceptions
    through to Django. A view under ``@idempotent`` doesn't need it, and gets nothing from it: what a ``claim()`` block
    inside of it raises is no answer to the request's own key.
    """

    def process_exception(self, request: HttpRequest, exception: Exception) -> Any:
        if not isinstance(exception, IdempotencyError) or is_crash(request, exception):
            return None
        return response_for(exception, request)
