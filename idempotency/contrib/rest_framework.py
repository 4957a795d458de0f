"""Django REST framework: ``IdempotentMixin``, and what ``@idempotent`` needs to know of a DRF view.

Authentication, permissions and throttles have run before any of this: DRF calls a handler after ``initial()``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MethodType
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured

try:
    from rest_framework import serializers
    from rest_framework.exceptions import APIException, ValidationError
    from rest_framework.fields import Field, SkipField, empty
    from rest_framework.relations import ManyRelatedField, RelatedField
    from rest_framework.response import Response
except ImportError as error:  # pragma: no cover - the base environment has no DRF to fail without
    raise ImportError(
        "idempotency.contrib.rest_framework needs Django REST framework: pip install 'django-idempotency[drf]'"
    ) from error

from django.db import connections, transaction

from .. import keys
from ..exceptions import IdempotencyError
from ..http.decorators import Protected, exempt_from_atomic_requests
from ..http.exchange import Exchange
from ..http.problems import CONTENT_TYPE, problem
from ..operation import Operation, operation_for
from ..protocol.claims import alias


class IdempotentMixin:
    """Protect handlers of an APIView or ViewSet, named in ``idempotent_operations``.

    Keys are a ViewSet's actions, or an APIView's methods in lower case; values are names or ``Operation`` objects::

        class ChargeViewSet(IdempotentMixin, viewsets.ModelViewSet):
            idempotent_operations = {"create": "charges.create"}
    """

    idempotent_operations: ClassVar[Mapping[str, str | Operation]] = {}
    _protected_handlers: ClassVar[dict[str, Protected]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._protected_handlers = {}
        for name in cls.idempotent_operations:
            if hasattr(cls, "as_view") and not hasattr(cls, name):
                raise ImproperlyConfigured(
                    f"{cls.__name__}.idempotent_operations names {name!r}, and {cls.__name__} has no such handler."
                )
            cls.idempotent_operation(name)  # declared when the class is made, not at the first request
        exempt_from_atomic_requests(cls)

    @classmethod
    def idempotent_operation(cls, name: str) -> Operation | None:
        """The operation of the handler ``name``, or None where it isn't protected by the mixin."""
        declaration = cls.idempotent_operations.get(name)
        return None if declaration is None else operation_for(declaration, {})

    def initial(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)  # type: ignore[misc]
        method = request.method.lower()
        name = getattr(self, "action", None) or method
        if name not in self.idempotent_operations:
            return
        handler = getattr(type(self), name, None)
        if handler is None or isinstance(handler, Protected):
            return
        # dispatch() looks the handler up on this instance, which serves one request, right after initial().
        setattr(self, method, MethodType(self._protected(name, handler), self))

    @classmethod
    def _protected(cls, name: str, handler: Callable[..., Any]) -> Protected:
        known = cls._protected_handlers.get(name)
        if known is None or known.view is not handler:  # made once a class, and again if the handler was replaced
            operation = cls.idempotent_operation(name)
            assert operation is not None  # the name is one of the mapping's
            known = cls._protected_handlers[name] = Protected(operation, handler)
        return known


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
        self.keep_body_readable()
        if not self.content_length() and self.request.body:
            return self.request.body  # sent in chunks: DRF takes it for empty, and a handler may read it all the same
        return self.request.data  # a ParseError or UnsupportedMediaType is the view's own answer; nothing is claimed

    def command(self) -> object:
        declared = self.operation.command
        if isinstance(declared, type) and issubclass(declared, serializers.BaseSerializer):
            return declared_fields(declared(context=self.view_context()), self.parsed_body())
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


class IdempotencyAPIException(APIException):
    """An ``IdempotencyError`` as DRF's exception handlers know errors; the original is ``__cause__``."""

    def __init__(self, error: IdempotencyError) -> None:
        self.status_code = error.status_code
        self.default_code = error.code
        # Not through APIException.__init__, which would turn the status member into text.
        self.detail = problem(error)
        self.wait = error.retry_after  # DRF's handler makes Retry-After of it
        self.auth_header: str | None = None
        self.__cause__ = error

    def __str__(self) -> str:
        return str(self.__cause__)

    def get_codes(self) -> str:
        return self.default_code

    def get_full_details(self) -> Any:
        return self.detail


def declared_fields(serializer: Any, data: Any) -> object:
    """The part of a payload that a serializer declares, each field in its own type.

    Only ``to_internal_value`` of fields that don't query: validators and relations look at state that the first
    execution changes, and a retry must have the same fingerprint. What a field can't read stays as it was sent.
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
        return convert(value)
    except (ValidationError, SkipField):
        return value


__all__ = ["IdempotencyAPIException", "IdempotentMixin", "RestFrameworkExchange", "declared_fields"]
