"""Adapters for web frameworks: ``Adapter``, and the choice of the adapter for a request.

``Adapter`` itself is for plain Django. The adapter of another framework is a subclass that overrides what its framework
does differently. Register it with ``register``::

    @register
    class ShinobiAdapter(Adapter):
        @classmethod
        def speaks_for(cls, request):
            return hasattr(request, "shinobi_api")

        def render(self, answer): ...

The module that registers it must be imported before the first request, for example in an app's ``ready()``.
``contrib.rest_framework`` and ``contrib.ninja`` are imported there, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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

#: Exceptions with which a handler refuses a request. Django turns them into 4xx responses, the same at each retry.
DETERMINISTIC_FAILURES = (Http404, PermissionDenied, SuspiciousOperation, BadRequest)


class Adapter:
    """One request, and what its framework does in its own way.

    ``request`` is the request with which the handler was called. ``http`` is Django's request inside it.
    """

    def __init__(self, request: Any) -> None:
        self.request = request
        self.http: HttpRequest = self.request_of_django(request)
        #: The keyword arguments that the handler was called with.
        self.kwargs: Mapping[str, Any] = {}
        #: The headers of every response to a request with a key.
        self.headers: dict[str, str] = {}

    @classmethod
    def speaks_for(cls, request: object) -> bool:
        """Whether ``request`` is a request of this framework."""
        return isinstance(request, HttpRequest)

    @classmethod
    def prepare_class(cls, view_class: Any) -> None:
        """Called each time a class with protected handlers is routed, whatever its framework."""

    @classmethod
    def prepare_view(cls, view: Any) -> None:
        """Called once for each view and method under ``@idempotent``, whatever its framework."""

    @classmethod
    def handlers_of(cls, callback: Any) -> list[tuple[Collection[str], Any]] | None:
        """The handlers behind a URL's callback, each with the methods that lead to it. It is for ``idempotency_audit``.

        :returns: None if the callback is not one of this framework that stands for several handlers.
        """
        return None

    @classmethod
    def request_of_django(cls, request: Any) -> HttpRequest:
        """Django's own request, which the framework may have wrapped."""
        django_request: HttpRequest = request
        return django_request

    def served_methods(self) -> set[str]:
        """The methods that lead to the handler, if it is a function; empty if that is not known."""
        return set()

    def payload(self, operation: Operation) -> object:
        """What the fingerprint is taken of: the operation's command object, or the parsed body.

        This may read the request, but the handler must find the request as if it were unprotected.
        """
        return parsed_body(self.http) if operation.command is None else operation.command(self.request)

    def render(self, answer: Any) -> Any:
        """Turn what the handler returned into the final response, with its status, headers and content.

        Called once per run, inside its transaction.

        :returns: the response; or ``answer`` itself if it is no response, which the caller then refuses.
        """
        if hasattr(answer, "render") and not answer.is_rendered:
            answer = answer.render()
        return answer

    def form_to_record(self, response: Any) -> Any:
        """The form of the response that is recorded: the response itself, unless it is made for one person only."""
        return response

    def answer_to_exception(self, error: Exception) -> Any | None:
        """The framework's answer to an exception of the handler, or None if the exception is a crash."""
        if isinstance(error, DETERMINISTIC_FAILURES):
            return response_for_exception(self.http, error)
        return None

    def answer_to_error(self, error: IdempotencyError) -> Any:
        """The response to an error of this package, in the form of the framework's own errors."""
        return problem_response(error)

    def replay(self, outcome: Outcome) -> Any:
        """Turn a recorded outcome into a response with the type and the attributes of the first response.

        :raises OutcomeUnreadableError: the record does not hold a response.
        """
        return response_of(outcome)


_AdapterType = TypeVar("_AdapterType", bound="type[Adapter]")

_registered: list[type[Adapter]] = []


def register(adapter: _AdapterType) -> _AdapterType:
    """Register the adapter of a framework. The last registered adapter is tried first, and Django's own last."""
    if adapter not in _registered:
        _registered.insert(0, adapter)
    return adapter


def unregister(adapter: type[Adapter]) -> None:
    """Forget an adapter. For tests that register one."""
    with suppress(ValueError):
        _registered.remove(adapter)


def prepare_class(view_class: Any) -> None:
    """Let each framework adapt a class with protected handlers that is being routed."""
    for adapter in _registered:
        adapter.prepare_class(view_class)


def prepare_view(view: Any) -> None:
    """Let each framework adapt a view under ``@idempotent``."""
    for adapter in _registered:
        adapter.prepare_view(view)


def handlers_of(callback: Any) -> list[tuple[Collection[str], Any]] | None:
    """What the first adapter that knows the callback of a URL says about its handlers, or None."""
    return next((found for adapter in _registered if (found := adapter.handlers_of(callback)) is not None), None)


def adapter_type_for(request: object) -> type[Adapter] | None:
    """The type of the adapter for ``request``, or None if that is not a request."""
    known: list[type[Adapter]] = [*_registered, Adapter]
    return next((adapter for adapter in known if adapter.speaks_for(request)), None)


def adapter_for(request: object) -> Adapter | None:
    """The adapter for ``request``, or None if that is not a request."""
    found = adapter_type_for(request)
    return None if found is None else found(request)
