"""Adapters for web frameworks. ``Adapter`` is for plain Django, and each other framework has a subclass.

Apply ``@register`` to the subclass. Its module must be imported before the first request, for example in an app's
``ready()``.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from types import CodeType
from typing import Any, ClassVar, Final, TypeVar

from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.core.handlers.exception import response_for_exception
from django.http import (
    Http404,
    HttpRequest,
    HttpResponse,
    HttpResponseBadRequest,
    HttpResponseForbidden,
    HttpResponseGone,
    HttpResponseNotFound,
    HttpResponsePermanentRedirect,
    HttpResponseRedirect,
    JsonResponse,
)
from django.urls import ResolverMatch
from django.views import View

from ..bodies import UNREADABLE, decode_body, is_json
from ..exceptions import IdempotencyError, OutcomeUnreadableError
from ..operation import Policy
from ..outcome import Outcome
from .payload import parsed_body
from .problems import Profile, problem_response
from .protection import RoutedHandler, handlers_of_class, methods_of_class, protection_of
from .stack import class_of

#: Exceptions of a handler that Django turns into 4xx responses, the same at each retry.
DETERMINISTIC_FAILURES = (Http404, PermissionDenied, SuspiciousOperation, BadRequest)


class Adapter:
    """One request, and the behaviour specific to its framework.

    ``request`` is the handler's argument. ``http`` is Django's request inside it.
    """

    #: The code of the framework's decorators that check nothing.
    harmless: ClassVar[frozenset[CodeType]] = frozenset()

    def __init__(self, request: Any, http: HttpRequest | None = None) -> None:
        self.request = request
        self.http: HttpRequest = request if http is None else http
        #: The handler's keyword arguments.
        self.kwargs: Mapping[str, Any]
        self.profile: Profile

    @classmethod
    def speaks_for(cls, request: object) -> bool:
        return isinstance(request, HttpRequest)

    @classmethod
    def prepare_view(cls, view: Any) -> None:
        """Called once for each view or method under ``@idempotent``, regardless of its framework."""

    @classmethod
    def handlers_of(cls, callback: Any) -> list[RoutedHandler] | None:
        """The handlers of a URL's callback, or None if it belongs to another framework."""
        view_class = class_of(callback)
        if view_class is None:
            return [RoutedHandler(callback)]
        if protection_of(callback) is not None:  # around as_view()
            return [RoutedHandler(callback, frozenset(methods_of_class(view_class)))]
        return handlers_of_class(view_class)

    @classmethod
    def hooks_of(cls, view_class: type) -> Collection[str]:
        """The methods of a class that run before the handler, and whose return value would not stop it."""
        return {"setup"}

    @classmethod
    def unsafe_handlers_of_class(cls, view_class: type) -> Collection[str]:
        """The possible names of handlers of unsafe methods in a class, as far as known before it is routed."""
        return {"post", "put", "patch", "delete"}

    @classmethod
    def doubts_about(cls, callback: Any, parameters: Collection[str]) -> list[str]:
        """Warnings about checks of a URL's handlers that a replay skips, as sentences.

        :param parameters: the names of the URL's parameters.
        """
        return []

    def served_methods(self, name: str) -> Collection[str]:
        """The methods that lead to the handler ``name`` of a class, or to a function (""). Empty if unknown."""
        return {name.upper()} if name in View.http_method_names else set()

    def is_place_named(self, match: ResolverMatch) -> bool:
        """Whether the project named the URL pattern. Patterns with the same name are the same place."""
        return bool(match.url_name)

    def payload(self, policy: Policy) -> object:
        """The payload for the fingerprint. The request must stay unread for the handler."""
        return parsed_body(self.http) if policy.payload is None else policy.payload(self.request)

    def render(self, answer: Any) -> Any:
        """Render the handler's return value. Called in the run's transaction.

        The caller refuses anything but a response.
        """
        return answer.render() if hasattr(answer, "render") else answer

    def form_to_record(self, response: Any) -> Any:
        """The response to record. It differs from ``response`` if that is personalised."""
        return response

    def answer_to_exception(self, error: Exception) -> Any | None:
        """The framework's response to an exception of the handler, or None if the exception is a crash."""
        if isinstance(error, DETERMINISTIC_FAILURES):
            return response_for_exception(self.http, error)
        return None

    def answer_to_error(self, error: IdempotencyError) -> Any:
        """The response to an error of this package, in the framework's error format."""
        return problem_response(error, self.profile)

    def add_headers_to_refusal(self, headers: Mapping[str, str]) -> None:
        """Add headers to the framework's response to an exception that propagates, such as a parser's."""

    def permit_replay(self) -> None:
        """Run the handler's own checks as far as the framework allows, and undo their writes.

        :raises Exception: a check refused the caller, or failed. A 404 may also mean that the operation removed its
            object.
        """

    def replay(self, outcome: Outcome) -> Any:
        """A response with the type and attributes of the recorded response.

        :raises OutcomeUnreadableError: the record is damaged.
        """
        return response_of(outcome)


#: The frameworks with adapters in ``contrib``. An adapter is loaded if the framework's app is installed.
FRAMEWORKS: Final = ("rest_framework", "ninja")


def frameworks_without_adapter() -> list[str]:
    """The frameworks that are imported but missing from ``INSTALLED_APPS``."""
    return [name for name in FRAMEWORKS if name in sys.modules and f"idempotency.contrib.{name}" not in sys.modules]


def advice_on_adapters() -> str:
    """A sentence about frameworks missing from ``INSTALLED_APPS``; empty if there are none."""
    names = " and ".join(map(repr, frameworks_without_adapter()))
    return names and f" Add {names} to INSTALLED_APPS to load the adapter that protects views of that framework."


_AdapterType = TypeVar("_AdapterType", bound="type[Adapter]")

#: The adapters in the order in which they are tried. ``Adapter`` is last, because it accepts any ``HttpRequest``.
adapters: list[type[Adapter]] = [Adapter]


def register(adapter: _AdapterType) -> _AdapterType:
    """Register the adapter of a framework. The adapter registered last is tried first."""
    if adapter not in adapters:
        adapters.insert(0, adapter)
    return adapter


def handlers_of(callback: Any) -> list[RoutedHandler]:
    return next(found for adapter in adapters if (found := adapter.handlers_of(callback)) is not None)


def hooks_of(view_class: type) -> set[str]:
    return {name for adapter in adapters for name in adapter.hooks_of(view_class)}


def unsafe_handlers_of_class(view_class: type) -> list[str]:
    """The names of a class's handlers of unsafe methods, according to all adapters."""
    names = {name for adapter in adapters for name in adapter.unsafe_handlers_of_class(view_class)}
    return sorted(name for name in names if hasattr(view_class, name))


def adapter_for(request: object) -> Adapter | None:
    """The adapter for ``request``, or None if it is not a request."""
    for adapter in adapters:
        if adapter.speaks_for(request):
            return adapter(request)
    return None


def http_of(request: Any) -> HttpRequest:
    """Django's request inside a framework's request."""
    adapter = adapter_for(request)
    http: HttpRequest = request if adapter is None else adapter.http
    return http


#: The statuses for which Django has a response class.
_CLASSES: dict[int, type[HttpResponse]] = {
    400: HttpResponseBadRequest,
    403: HttpResponseForbidden,
    404: HttpResponseNotFound,
    410: HttpResponseGone,
}
_PERMANENT_REDIRECTS = frozenset({301, 308})
_REDIRECTS = frozenset({302, 303, 307}) | _PERMANENT_REDIRECTS


def response_of(outcome: Outcome) -> HttpResponse:
    """The recorded response, in Django's class for its status and content, so that a redirect has its ``url``.

    :raises OutcomeUnreadableError: the record is damaged.
    :raises BodyGoneError: the body is no longer kept.
    """
    try:
        names = {name.lower(): value for name, value in outcome.headers}
        kind = _class_of(outcome.status, names)
        response = kind.__new__(kind)
        # Not the subclass's constructor, which needs the data, or rejects a redirect to an app's custom scheme.
        HttpResponse.__init__(response, decode_body(outcome.body), status=outcome.status, headers=dict(outcome.headers))
    except UNREADABLE as error:
        raise OutcomeUnreadableError from error
    if "content-type" not in names:
        del response["Content-Type"]  # Django's default, which was not sent
    # As on a TemplateResponse. A decorator that changes it must not fail at a replay.
    response.context_data = {}  # type: ignore[attr-defined]
    return response


def _class_of(status: int, names: Mapping[str, str]) -> type[HttpResponse]:
    if status in _REDIRECTS and "location" in names:
        return HttpResponsePermanentRedirect if status in _PERMANENT_REDIRECTS else HttpResponseRedirect
    if is_json(names.get("content-type", "")):
        return JsonResponse
    return _CLASSES.get(status, HttpResponse)
