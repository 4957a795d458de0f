"""The adapter for a request to a DRF view.

Authentication, permissions and throttles run before this, because DRF calls a handler after ``initial()``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

from django.core.exceptions import RequestDataTooBig
from django.db import connections, transaction
from django.http import HttpRequest, RawPostDataException
from rest_framework import serializers
from rest_framework.exceptions import UnsupportedMediaType
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.parsers import JSONParser, MultiPartParser
from rest_framework.renderers import BrowsableAPIRenderer
from rest_framework.response import Response
from rest_framework.views import APIView

from ...exceptions import IdempotencyError
from ...http import bodies
from ...http.adapters import Adapter, register
from ...http.class_views import methods_of_class
from ...http.problems import CONTENT_TYPE, problem
from ...identity.parsing import parse_json
from ...operation import Operation
from ...outcome import UNREADABLE, Outcome, decode_body, is_json
from ...protocol.transactions import alias
from .commands import as_sent, declared_fields
from .errors import IdempotencyAPIException
from .throttling import answer_throttled_retries


@register
class RestFrameworkAdapter(Adapter):
    """The adapter for DRF's ``Request`` and its view."""

    def __init__(self, request: Any) -> None:
        super().__init__(request)
        self.view: Any = request.parser_context["view"]
        self._form_to_record: Response | None = None

    @classmethod
    def speaks_for(cls, request: object) -> bool:
        return getattr(request, "parser_context", None) is not None

    @classmethod
    def prepare_class(cls, view_class: Any) -> None:
        if issubclass(view_class, APIView):
            answer_throttled_retries(view_class)

    @classmethod
    def request_of_django(cls, request: Any) -> HttpRequest:
        http: HttpRequest = request._request  # Django's request, because DRF's wrapper proxies attributes slowly
        return http

    def served_methods(self) -> set[str]:
        return methods_of_class(type(self.view))  # the class that @api_view made

    def payload(self, operation: Operation) -> object:
        # If DRF answers by itself, for example because it can't parse the payload, its response has the view's headers.
        self.view.headers.update(self.headers)
        command: Any = operation.command
        if isinstance(command, type) and issubclass(command, serializers.BaseSerializer):
            context = {"request": self.request, "view": self.view, "format": None}
            # In the form of a partial update, an absent field is not changed. In other forms, an absent checkbox is
            # False.
            partial = self.http.method == "PATCH"
            return declared_fields(command(context=context, partial=partial), self._data())
        if command is not None:
            return command(self.request)
        if self._is_json_of_drf():
            with suppress(ValueError):
                return parse_json(self.http.body)
        elif self._has_parts():
            return bodies.parts(self.http)
        return as_sent(self._data(), self.http)

    def _is_json_of_drf(self) -> bool:
        """Whether the payload goes to DRF's own JSON parser, which takes whatever has a canonical form.

        Then it need not parse before the handler asks for it, which on a replay is never.
        """
        request = self.request
        return (
            self.http.content_type == "application/json"
            and bodies.content_length(self.http) > 0
            and bodies.fits_in_memory(self.http)
            and type(request.negotiator) is DefaultContentNegotiation
            and type(next(iter(request.parsers), None)) is JSONParser
        )

    def _has_parts(self) -> bool:
        if not bodies.has_parts(self.http):
            return False
        parser = self.request.negotiator.select_parser(self.request, self.request.parsers)
        return type(parser) is MultiPartParser  # a project's own parser may read a form differently

    def _data(self) -> object:
        bodies.keep_readable(self.http)
        if not bodies.content_length(self.http) and self.request.body:
            return self.request.body  # chunked: DRF takes it for empty, but a handler may still read it
        try:
            return self.request.data  # a ParseError is the view's own answer: nothing is claimed
        except UnsupportedMediaType:
            if not bodies.fits_in_memory(self.http):
                raise
            return self.request.body  # the handler answers 415 itself if it reads the payload

    def render(self, answer: Any) -> Any:
        response = self._finalize(answer)
        renderer = getattr(response, "accepted_renderer", None)
        if isinstance(renderer, BrowsableAPIRenderer) and not response.is_rendered:
            # Render the data before the page, because the page's renderer may change the status of the response.
            self._form_to_record = self._as_data(response, renderer)
        return super().render(response)

    def _finalize(self, answer: Any) -> Any:
        context = self.request.parser_context
        finalize = self.view.finalize_response
        response = finalize(self.request, answer, *context["args"], **context["kwargs"])
        self.view.finalize_response = _Finalized(response, finalize)
        return response

    def _as_data(self, page: Response, renderer: BrowsableAPIRenderer) -> Response | None:
        """The data of the browsable API's page, rendered by the view's first renderer that is not for people."""
        data_renderer = renderer.get_default_renderer(self.view)
        if data_renderer is None:
            return None
        headers = {name: value for name, value in page.items() if name.lower() != "content-type"}
        response = Response(page.data, status=page.status_code, headers=headers)
        response.accepted_renderer = data_renderer
        response.accepted_media_type = data_renderer.media_type
        response.renderer_context = self.view.get_renderer_context()  # type: ignore[attr-defined]
        response.render()
        return response

    def form_to_record(self, response: Any) -> Any:
        # Don't record the page of the browsable API, because it contains the person's name and forms with CSRF tokens.
        return response if self._form_to_record is None else self._form_to_record

    def answer_to_exception(self, error: Exception) -> Any | None:
        self._form_to_record = None
        if isinstance(error, RawPostDataException) and not bodies.fits_in_memory(self.http):
            # An unprotected handler that reads a body above the limit gets this error, so a protected one gets it, too.
            error = RequestDataTooBig("Request body exceeded settings.DATA_UPLOAD_MAX_MEMORY_SIZE.")
        try:
            return self._handle(error)
        except Exception as unhandled:
            if unhandled is not error:
                raise
        response = super().answer_to_exception(error)  # errors that Django answers with 400 and DRF doesn't know
        if response is None:
            # The handler crashed. The project's exception handler has just seen the error, so dispatch() must not call
            # it a second time.
            self.view.handle_exception = _raise
        return response

    def answer_to_error(self, error: IdempotencyError) -> Any:
        exception = IdempotencyAPIException(error)
        if error.status_code == 401:
            exception.auth_header = self.view.get_authenticate_header(self.request)
        response = self._handle(exception)
        data = getattr(response, "data", None)
        if isinstance(data, dict) and data.get("detail") is exception.detail:
            # DRF's own exception handler made this response, or a handler that adds to it.
            response.data = {**problem(error), **{name: value for name, value in data.items() if name != "detail"}}
            if getattr(getattr(self.request, "accepted_renderer", None), "format", None) == "json":
                response.content_type = CONTENT_TYPE
        return response

    def replay(self, outcome: Outcome) -> Any:
        """Make a DRF ``Response`` with ``data`` if the recorded body is JSON or empty. Others have no ``data``."""
        try:
            headers = dict(outcome.headers)
            content_type = next((value for name, value in headers.items() if name.lower() == "content-type"), "")
            content = decode_body(outcome.body)
            # DRF gives an empty response no type, so an empty one with a type was Django's own.
            if not (is_json(content_type) if content else not content_type):
                return super().replay(outcome)
            data = json.loads(content) if content else None
            response = Response(data, status=outcome.status, headers=headers, exception=outcome.status >= 400)
            response.content = content  # the recorded bytes, not another rendering of the data
        except UNREADABLE:
            return super().replay(outcome)  # which raises, unless it is only the data that can't be had
        if not content_type:
            del response["Content-Type"]
        return response

    def _handle(self, error: Exception) -> Any:
        """The view's own answer to an exception.

        DRF's handler marks the transactions of ATOMIC_REQUESTS databases for rollback. No such transaction of the
        request is open here, but in a TestCase the test's transaction is. The block takes the mark in its place.
        """
        using = alias()
        with transaction.atomic(using=using) if connections[using].in_atomic_block else nullcontext():
            return self.view.handle_exception(error)


class _Finalized:
    """Replaces a view's ``finalize_response``, so that ``dispatch()`` does not finalize the final response again."""

    def __init__(self, response: Any, finalize: Callable[..., Any]) -> None:
        self.response = response
        self.finalize = finalize

    def __call__(self, request: Any, response: Any, *args: Any, **kwargs: Any) -> Any:
        return response if response is self.response else self.finalize(request, response, *args, **kwargs)


def _raise(error: Exception) -> Any:
    raise error
