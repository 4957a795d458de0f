"""The adapter for DRF's requests, and this package's errors as DRF's exceptions.

Authentication, permissions and throttles run before a replay, because DRF calls the handler after ``initial()``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from operator import is_
from typing import Any, Final

from django.core.exceptions import RequestDataTooBig
from django.db import connections, transaction
from django.http import HttpRequest, RawPostDataException
from rest_framework import serializers
from rest_framework.exceptions import APIException, UnsupportedMediaType, ValidationError
from rest_framework.fields import Field, SkipField, empty
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.parsers import JSONParser, MultiPartParser
from rest_framework.relations import ManyRelatedField, RelatedField
from rest_framework.renderers import BrowsableAPIRenderer
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSetMixin

from ... import foreign
from ...bodies import UNREADABLE, decode_body, is_json
from ...exceptions import IdempotencyError
from ...http.adapter import Adapter, register
from ...http.payload import content_length, fits_in_memory, has_parts, keep_readable, parts
from ...http.problems import CHALLENGE, PROFILES, Profile, problem, text_of
from ...http.protection import SAFE_METHODS, RoutedHandler, methods_of_class
from ...http.stack import class_of
from ...identity.parsing import parse_json
from ...operation import Policy
from ...options.values import IETF
from ...outcome import Outcome
from ...store import records_database
from .object_checks import arguments_of_lookup, check_object, may_refuse, object_checks
from .view_classes import HARMLESS, handlers_of_view

HOOKS = frozenset(
    {"initial", "perform_authentication", "check_permissions", "check_object_permissions", "check_throttles"}
)


@register
class RestFrameworkAdapter(Adapter):
    harmless = HARMLESS

    def __init__(self, request: Any) -> None:
        super().__init__(request, http=foreign.http_request(request))
        self.view: Any = getattr(request, foreign.PARSER_CONTEXT)["view"]
        self._form_to_record: Response | None = None

    @classmethod
    def speaks_for(cls, request: object) -> bool:
        return getattr(request, foreign.PARSER_CONTEXT, None) is not None

    @classmethod
    def handlers_of(cls, callback: Any) -> list[RoutedHandler] | None:
        view_class = class_of(callback)
        if view_class is None or not issubclass(view_class, APIView):
            return None
        return handlers_of_view(
            view_class, getattr(callback, foreign.VIEW_ACTIONS, None), getattr(callback, foreign.VIEW_ARGUMENTS, {})
        )

    @classmethod
    def hooks_of(cls, view_class: type) -> Collection[str]:
        return HOOKS if issubclass(view_class, APIView) else ()

    @classmethod
    def unsafe_handlers_of_class(cls, view_class: type) -> Collection[str]:
        if not issubclass(view_class, ViewSetMixin):
            return ()
        extra: Any = view_class.get_extra_actions()
        mapped = {
            name for action in extra for method, name in action.mapping.items() if method.upper() not in SAFE_METHODS
        }
        return {"create", "update", "partial_update", "destroy", *mapped}

    @classmethod
    def doubts_about(cls, callback: Any, parameters: Collection[str]) -> list[str]:
        view_class, initial = class_of(callback), getattr(callback, foreign.VIEW_ARGUMENTS, {})
        if view_class is None or not issubclass(view_class, APIView) or not set(parameters) - {"format"}:
            return []
        queryset = initial.get("queryset", getattr(view_class, "queryset", None))
        if arguments_of_lookup(view_class, parameters, queryset, initial.get("detail") is True) is not None:
            return []
        permissions = initial.get("permission_classes", view_class.permission_classes)
        return [
            f"{name} is called within the handler, so not before a replay. The package calls it if the view has "
            f"get_object() and the URL has its lookup_url_kwarg."
            for name in sorted(object_checks(view_class, permissions))
        ]

    def served_methods(self, name: str) -> Collection[str]:
        if not name:
            return methods_of_class(type(self.view))  # the class that @api_view created
        actions = getattr(self.view, foreign.ACTION_MAP, None)
        if actions is None:
            return super().served_methods(name)
        return {method.upper() for method, action in actions.items() if action == name}

    def payload(self, policy: Policy) -> object:
        command: Any = policy.payload
        if isinstance(command, type) and issubclass(command, serializers.BaseSerializer):
            context = {"request": self.request, "view": self.view, "format": None}
            # An absent field of a form is not changed by a partial update. Otherwise an absent checkbox means False.
            partial = self.http.method == "PATCH"
            return declared_fields(command(context=context, partial=partial), self._data())
        if command is not None:
            return command(self.request)
        negotiator, parsers = foreign.negotiator(self.request), self.request.parsers
        if (
            self.http.content_type == "application/json"
            and content_length(self.http) > 0  # not chunked
            and fits_in_memory(self.http)
            and type(negotiator) is DefaultContentNegotiation
            and type(next(iter(parsers), None)) is JSONParser
        ):
            # DRF's parser accepts every document that has a canonical form, so it need not run on a replay, or before
            # the handler needs it.
            try:
                return parse_json(self.http.body)
            except ValueError:
                pass  # DRF's parser decides
        # A project's parser may read a form differently.
        elif has_parts(self.http) and type(negotiator.select_parser(self.request, parsers)) is MultiPartParser:
            return parts(self.http)
        return as_sent(self._data(), self.http)

    def _data(self) -> object:
        keep_readable(self.http)
        if not content_length(self.http) and self.request.body:
            return self.request.body  # chunked: DRF treats it as empty, but a handler may read it
        try:
            return self.request.data  # may raise a ParseError, before the claim
        except UnsupportedMediaType:
            if not fits_in_memory(self.http):
                raise
            return self.request.body  # the handler gets the error if it reads the payload

    def render(self, answer: Any) -> Any:
        context, finalize = getattr(self.request, foreign.PARSER_CONTEXT), self.view.finalize_response
        response = finalize(self.request, answer, *context["args"], **context["kwargs"])
        foreign.set_finalize(self.view, _unless_final(finalize, response))
        renderer = getattr(response, "accepted_renderer", None)
        if isinstance(renderer, BrowsableAPIRenderer) and not response.is_rendered:
            # Render the data before the page, because the page's renderer may change the response's status.
            self._form_to_record = self._as_data(response, renderer)
        return super().render(response)

    def _as_data(self, page: Response, renderer: BrowsableAPIRenderer) -> Response | None:
        """The data of a browsable API page, rendered by the view's first other renderer."""
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
        # A page of the browsable API contains the person's name and CSRF tokens.
        return response if self._form_to_record is None else self._form_to_record

    def answer_to_exception(self, error: Exception) -> Any | None:
        self._form_to_record = None
        if isinstance(error, RawPostDataException) and not fits_in_memory(self.http):
            # Like an unprotected handler that reads a body above the limit.
            error = RequestDataTooBig("Request body exceeded settings.DATA_UPLOAD_MAX_MEMORY_SIZE.")
        try:
            return self._handle(error)
        except Exception as unhandled:
            if unhandled is not error:
                raise
        response = super().answer_to_exception(error)  # an error unknown to DRF, which Django may answer with a 400
        if response is None:
            foreign.set_handle(self.view, _unless_final(self.view.handle_exception, error))
        return response

    def answer_to_error(self, error: IdempotencyError) -> Any:
        exception = IdempotencyAPIException(error, self.profile)
        if exception.status_code == 401:
            exception.auth_header = self.view.get_authenticate_header(self.request) or CHALLENGE
        response = self._handle(exception)
        data = getattr(response, "data", None)
        if isinstance(data, dict) and data.get("detail") is exception.detail:
            # The response of DRF's exception handler, or of a handler that extends it.
            response.data = {
                **problem(error, self.profile),
                **{name: value for name, value in data.items() if name != "detail"},
            }
            if getattr(getattr(self.request, "accepted_renderer", None), "format", None) == "json":
                response.content_type = self.profile.content_type
        return response

    def add_headers_to_refusal(self, headers: Mapping[str, str]) -> None:
        foreign.response_headers(self.view).update(headers)

    def permit_replay(self) -> None:
        view = self.view
        if not hasattr(view, "get_object") or not may_refuse(view):
            return
        detail = getattr(view, "detail", None)  # set if a router created the route
        if detail is None:
            detail = self.http.method != "POST"  # a POST usually creates an object
        arguments = arguments_of_lookup(view, view.kwargs, getattr(view, "queryset", None), detail)
        if arguments is not None:
            check_object(view, arguments)

    def replay(self, outcome: Outcome) -> Any:
        """Make a DRF ``Response`` if the recorded body is JSON or empty. Other replays have empty ``data``."""
        content_type = next((value for name, value in outcome.headers if name.lower() == "content-type"), "")
        if not content_type or is_json(content_type):
            try:
                content = decode_body(outcome.body)
                # DRF gives an empty response no content type, so an empty response with a type came from Django.
                if bool(content) == bool(content_type):
                    data = json.loads(content) if content else None
                    is_error = outcome.status >= 400
                    response = Response(data, status=outcome.status, headers=dict(outcome.headers), exception=is_error)
                    response.content = content  # the recorded bytes, not another rendering of the data
                    if not content_type:
                        del response["Content-Type"]
                    return response
            except UNREADABLE:
                pass  # a damaged record is reported below
        plain: Any = super().replay(outcome)
        plain.data = {}  # a decorator that changes it must not fail at a replay
        return plain

    def _handle(self, error: Exception) -> Any:
        """The view's response to an exception.

        DRF marks open transactions of ATOMIC_REQUESTS databases for rollback. Here only the transaction of a TestCase
        can be open. This block takes the mark instead.
        """
        using = records_database()
        with transaction.atomic(using=using) if foreign.in_atomic_block(connections[using]) else nullcontext():
            return self.view.handle_exception(error)


def _unless_final(method: Callable[..., Any], final: object) -> Callable[..., Any]:
    """Wrap a view's method that ``dispatch()`` calls after the handler, so that it isn't called again with ``final``.

    Only for this object, because an override of the protected handler may return another response, or raise another
    error.

    :param final: a response that ``method`` has returned, or an error that it has raised.
    """
    is_final = partial(is_, final)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not any(map(is_final, args)):
            return method(*args, **kwargs)
        if isinstance(final, BaseException):
            raise final
        return final

    return call


class IdempotencyAPIException(APIException):
    """An ``IdempotencyError`` as an ``APIException``. ``__cause__`` is the original error.

    As in DRF's errors, ``detail`` is an ``ErrorDetail``, which exception handlers and loggers expect.
    """

    def __init__(self, error: IdempotencyError, profile: Profile = PROFILES[IETF]) -> None:
        answer = profile.answer_to(error)
        self.status_code: int = answer.status
        self.default_code: str = answer.code
        super().__init__(detail=text_of(error), code=answer.code)
        self.wait: Final = error.retry_after  # DRF's handler turns it into Retry-After
        self.auth_header: str | None = None
        self.__cause__: BaseException | None = error


def as_sent(data: object, http: HttpRequest) -> object:
    """The canonical text of a JSON body that can still be read; otherwise ``data``, the payload as DRF parsed it.

    DRF's floats can't distinguish 9007199254740992.5 from 9007199254740993.0, and DRF drops one of two equal names. A
    handler that parses the body itself may notice the difference.
    """
    if is_json(http.content_type or "") and hasattr(http, foreign.BODY) and not isinstance(data, bytes):
        # An error means that the body is empty or not in UTF-8, although DRF parsed it.
        with suppress(ValueError):
            return parse_json(http.body)
    return data


def declared_fields(serializer: Any, data: Any) -> object:
    """The part of a payload that a serializer declares, with each value converted to its field's type.

    Only ``to_internal_value`` is used, and only for fields that don't query the database, because a retry must have the
    same fingerprint, and validators and relations depend on state that the first execution changes. A value that a
    field can't read is used as sent.
    """
    if isinstance(serializer, serializers.ListSerializer):
        if not isinstance(data, list):
            return data
        return [declared_fields(serializer.child, item) for item in data]
    if not isinstance(serializer, serializers.Serializer) or not isinstance(data, Mapping):
        return data
    return {
        name: _read(field, value)
        for name, field in serializer.fields.items()
        if not field.read_only and (value := field.get_value(data)) is not empty
    }


def _read(field: Field[Any, Any, Any, Any], value: Any) -> object:
    if isinstance(field, serializers.BaseSerializer):
        return declared_fields(field, value)
    if value is None or isinstance(field, (RelatedField, ManyRelatedField)):
        return value
    convert: Callable[[Any], object] = field.to_internal_value
    try:
        read = convert(value)
    except (ValidationError, SkipField):
        return value
    # Older releases read several choices as a set, whose order differs between processes.
    return sorted(read, key=str) if isinstance(read, set) else read
