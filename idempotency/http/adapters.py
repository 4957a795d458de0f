"""A web framework as the exchange sees it: ``Adapter``, and which adapter speaks for a request.

``Adapter`` itself speaks plain Django. Another framework is a subclass that overrides what its framework does in
another way, and is made known with ``register``::

    @register
    class NinjaAdapter(Adapter):
        @classmethod
        def speaks_for(cls, request):
            return hasattr(request, "ninja_api")

        def render(self, answer): ...

The module that registers it must be imported before the first request, for example in an app's ``ready()``. That is
where ``contrib.rest_framework`` is loaded too.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeVar

from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.core.handlers.exception import response_for_exception
from django.http import Http404, HttpRequest

from ..exceptions import IdempotencyError
from ..operation import Operation
from ..outcome import Outcome, response_of
from .bodies import parsed_body
from .problems import problem_response

#: What a handler raises to say no. Django turns them into 4xx responses, and the same request gets the same one again.
DETERMINISTIC_FAILURES = (Http404, PermissionDenied, SuspiciousOperation, BadRequest)


class Adapter:
    """One request, and what its framework does in its own way.

    ``request`` is what the handler was called with, ``http`` is Django's request beneath it.
    """

    def __init__(self, request: Any) -> None:
        self.request = request
        self.http: HttpRequest = self.request_of_django(request)

    @classmethod
    def speaks_for(cls, request: object) -> bool:
        """Whether ``request`` is one of this framework's, which the framework has handed to a handler."""
        return isinstance(request, HttpRequest)

    @classmethod
    def request_of_django(cls, request: Any) -> HttpRequest:
        """Django's own request, where the framework wraps it."""
        django_request: HttpRequest = request
        return django_request

    def payload(self, operation: Operation) -> object:
        """What the fingerprint is taken of: the operation's command object, or the parsed body.

        The handler must find the request as it would unprotected, whatever of it is read here.
        """
        return parsed_body(self.http) if operation.command is None else operation.command(self.request)

    def render(self, answer: Any) -> Any:
        """The final response to what the handler returned, with its status, headers and content.

        Called once a run, inside its transaction. What can't be made a response is returned as it is, and refused.
        """
        if hasattr(answer, "render") and not answer.is_rendered:
            answer = answer.render()
        return answer

    def form_to_record(self, response: Any) -> Any:
        """The form of a rendered response that retries get: the response itself, unless that suits one caller only."""
        return response

    def answer_to_exception(self, error: Exception) -> Any | None:
        """The framework's answer to an exception of the handler, or None if the exception is a crash."""
        if isinstance(error, DETERMINISTIC_FAILURES):
            return response_for_exception(self.http, error)
        return None

    def answer_to_error(self, error: IdempotencyError) -> Any:
        """The response to an error of this package, in the framework's own way of telling errors."""
        return problem_response(error)

    def replay(self, outcome: Outcome) -> Any:
        """A recorded outcome as a response of the type and with the attributes that the first response had.

        :raises OutcomeUnreadableError: the record does not hold a response.
        """
        return response_of(outcome)


_AdapterType = TypeVar("_AdapterType", bound="type[Adapter]")

_registered: list[type[Adapter]] = []


def register(adapter: _AdapterType) -> _AdapterType:
    """Make the adapter of a framework known. The one registered last is asked first; Django's own is asked last."""
    if adapter not in _registered:
        _registered.insert(0, adapter)
    return adapter


def unregister(adapter: type[Adapter]) -> None:
    """Forget an adapter, as a test does that registered one."""
    with suppress(ValueError):
        _registered.remove(adapter)


def adapter_type_for(request: object) -> type[Adapter] | None:
    """The adapter that speaks for ``request``, or None if it is not a request."""
    known: list[type[Adapter]] = [*_registered, Adapter]
    return next((adapter for adapter in known if adapter.speaks_for(request)), None)


def adapter_for(request: object) -> Adapter | None:
    """``request`` in the adapter that speaks for it, or None if it is not a request."""
    found = adapter_type_for(request)
    return None if found is None else found(request)
