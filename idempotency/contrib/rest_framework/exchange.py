"""One request that went through a DRF view.

Authentication, permissions and throttles have run before any of this: DRF calls a handler after ``initial()``.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from django.db import connections, transaction
from rest_framework import serializers
from rest_framework.response import Response

from ... import keys
from ...exceptions import IdempotencyError
from ...http.exchange import Exchange
from ...http.problems import CONTENT_TYPE
from ...protocol.claims import alias
from .commands import as_sent, declared_fields
from .errors import IdempotencyAPIException


def _raise(error: Exception) -> Any:
    raise error


class RestFrameworkExchange(Exchange):
    """An exchange whose request went through a DRF view."""

    @property
    def view(self) -> Any:
        return self.request.parser_context["view"]

    def _respond_to(self, key: str) -> Any:
        # What DRF makes a response of itself, such as a payload that it can't parse, gets the headers of the view.
        self.view.headers[keys.HEADER] = self.meta[keys.META_NAME]
        return super()._respond_to(key)

    def parsed_body(self) -> object:
        return as_sent(self._data(), self.http)

    def _data(self) -> object:
        self.keep_body_readable()
        if not self.content_length() and self.request.body:
            return self.request.body  # sent in chunks: DRF takes it for empty, and a handler may read it all the same
        return self.request.data  # a ParseError or UnsupportedMediaType is the view's own answer; nothing is claimed

    def command(self) -> object:
        declared = self.operation.command
        if isinstance(declared, type) and issubclass(declared, serializers.BaseSerializer):
            # A form leaves out what a partial update doesn't change, and else the boxes that aren't ticked.
            partial = self.http.method == "PATCH"
            return declared_fields(declared(context=self.view_context(), partial=partial), self._data())
        return super().command()

    def view_context(self) -> dict[str, Any]:
        return {"request": self.request, "view": self.view, "format": None}

    def rendered(self, response: Any) -> Any:
        view, context = self.view, self.request.parser_context
        # dispatch() finalizes again what is returned to it, which changes nothing the second time.
        response = view.finalize_response(self.request, response, *context["args"], **context["kwargs"])
        return super().rendered(response)

    def response_to_failure(self, error: Exception) -> Any | None:
        try:
            return self._handled(error)
        except Exception as unhandled:
            if unhandled is not error:
                raise
        response = super().response_to_failure(error)  # what Django answers with 400, and DRF doesn't know
        if response is None:
            # A crash. dispatch() is about to ask the project's exception handler, which has seen it now.
            self.view.handle_exception = _raise
        return response

    def response_to_error(self, error: IdempotencyError) -> Any:
        exception = IdempotencyAPIException(error)
        if error.status_code == 401:
            exception.auth_header = self.view.get_authenticate_header(self.request)
        response = self._handled(exception)
        renderer = getattr(self.request, "accepted_renderer", None)
        if (
            isinstance(response, Response)
            and response.data is exception.detail
            and getattr(renderer, "format", None) == "json"
        ):
            response.content_type = CONTENT_TYPE
        return response

    def _handled(self, error: Exception) -> Any:
        """The view's own answer to an exception.

        DRF's handler marks the transactions of ATOMIC_REQUESTS databases for rollback. None of the request's is open
        here, but the one that TestCase wraps a test in is; the mark ends with this block instead.
        """
        using = alias()
        with transaction.atomic(using=using) if connections[using].in_atomic_block else nullcontext():
            return self.view.handle_exception(error)
