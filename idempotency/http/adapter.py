"""Adapters for web frameworks: ``Adapter``, and the choice of the adapter for a request.

``Adapter`` itself is for plain Django. The adapter of another framework is a subclass under ``@register``. Its module
must be imported before the first request, for example in an app's ``ready()``.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeVar

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

from ..exceptions import IdempotencyError, OutcomeUnreadableError
from ..operation import Policy
from ..outcome import UNREADABLE, Outcome, decode_body, is_json
from .payload import parsed_body
from .problems import Profile, problem_response
from .protection import RoutedHandler, class_of, handlers_of_class, methods_of_class, protection_of

#: Exceptions with which a handler refuses a request. Django turns them into 4xx responses, the same at each retry.
DETERMINISTIC_FAILURES = (Http404, PermissionDenied, SuspiciousOperation, BadRequest)


class Adapter:
    """One request, and what its framework does in its own way.

    ``request`` is the request with which the handler was called. ``http`` is Django's request inside it.
    """

    def __init__(self, request: Any, http: HttpRequest | None = None) -> None:
        self.request = request
        self.http: HttpRequest = request if http is None else http
        #: The keyword arguments that the handler was called with.
        self.kwargs: Mapping[str, Any]
        #: The names and statuses on the wire.
        self.profile: Profile
        #: The headers of every response to a request with a key.
        self.headers: dict[str, str]

    @classmethod
    def speaks_for(cls, request: object) -> bool:
        """Whether ``request`` is a request of this framework."""
        return isinstance(request, HttpRequest)

    @classmethod
    def prepare_view(cls, view: Any) -> None:
        """Called once for each view and method under ``@idempotent``, of all frameworks."""

    @classmethod
    def handlers_of(cls, callback: Any) -> list[RoutedHandler] | None:
        """The handlers behind a URL's callback, or None if it is not of this framework."""
        view_class = class_of(callback)
        if view_class is None:
            return [RoutedHandler(callback)]
        if protection_of(callback) is not None:  # around as_view()
            return [RoutedHandler(callback, frozenset(methods_of_class(view_class)))]
        return handlers_of_class(view_class)

    @classmethod
    def hooks_of(cls, view_class: type) -> Collection[str]:
        """The methods of a class that run before the handler. A replay there would not stop the handler."""
        return {"setup"}

    @classmethod
    def unsafe_handlers_of_class(cls, view_class: type) -> Collection[str]:
        """The names of the handlers of unsafe methods that a class may have, as far as the class tells."""
        return {method.lower() for method in ("POST", "PUT", "PATCH", "DELETE")}

    @classmethod
    def doubts_about(cls, callback: Any, parameters: Collection[str]) -> list[str]:
        """Sentences on checks of a view's handlers that do not run before a replay.

        :param callback: the callback of its URL, which has these ``parameters``.
        """
        return []

    def served_methods(self, name: str) -> Collection[str]:
        """The methods that lead to the handler ``name`` of a class, or to a function, which has no name. Empty if they
        are not known."""
        return {name.upper()} if name in View.http_method_names else set()

    def is_place_named(self, match: ResolverMatch) -> bool:
        """Whether the project has named the URL pattern. Patterns with one name are one place for a key."""
        return bool(match.url_name)

    def payload(self, policy: Policy) -> object:
        """The payload for the fingerprint: the operation's command object, or the parsed body.

        This may read the request, but the handler must find the request as if it were unprotected.
        """
        return parsed_body(self.http) if policy.payload is None else policy.payload(self.request)

    def render(self, answer: Any) -> Any:
        """The final response, with its status, headers and content, from what the handler returned.

        Called once per run, inside its transaction. The caller refuses what is no response.
        """
        return answer.render() if hasattr(answer, "render") else answer

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
        return problem_response(error, self.profile)

    def permit_replay(self) -> None:
        """Run the checks that the handler would run, as far as the framework lets us, and undo what they write.

        :raises Exception: a check has refused the caller, or could not be made.
        """

    def replay(self, outcome: Outcome) -> Any:
        """A response with the type and the attributes of the first response, from its record.

        :raises OutcomeUnreadableError: the record does not hold a response.
        """
        return response_of(outcome)


#: The frameworks whose adapters ``contrib`` has. Each is loaded if its app is installed.
FRAMEWORKS: Final = ("rest_framework", "ninja")


def frameworks_without_adapter() -> list[str]:
    """The frameworks that are imported, but are no apps of the project."""
    return [name for name in FRAMEWORKS if name in sys.modules and f"idempotency.contrib.{name}" not in sys.modules]


def advice_on_adapters() -> str:
    """A sentence on what is missing in ``INSTALLED_APPS``; empty if nothing is."""
    names = " and ".join(map(repr, frameworks_without_adapter()))
    return (
        f" Add {names} to INSTALLED_APPS, because views of that framework are protected by its adapter."
        if names
        else ""
    )


_AdapterType = TypeVar("_AdapterType", bound="type[Adapter]")

#: The adapters in the order in which they are tried. ``Adapter`` is the last: it speaks for every ``HttpRequest``.
adapters: list[type[Adapter]] = [Adapter]


def register(adapter: _AdapterType) -> _AdapterType:
    """Register the adapter of a framework. The last registered adapter is tried first, and Django's own last."""
    if adapter not in adapters:
        adapters.insert(0, adapter)
    return adapter


def handlers_of(callback: Any) -> list[RoutedHandler]:
    return next(found for adapter in adapters if (found := adapter.handlers_of(callback)) is not None)


def hooks_of(view_class: type) -> set[str]:
    return {name for adapter in adapters for name in adapter.hooks_of(view_class)}


def unsafe_handlers_of_class(view_class: type) -> list[str]:
    """The names of a class's handlers of unsafe methods, of all frameworks."""
    names = {name for adapter in adapters for name in adapter.unsafe_handlers_of_class(view_class)}
    return sorted(name for name in names if hasattr(view_class, name))


def adapter_for(request: object) -> Adapter | None:
    """The adapter for ``request``, or None if that is not a request."""
    return next((adapter(request) for adapter in adapters if adapter.speaks_for(request)), None)


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
    """The response from which ``outcome`` was made: its status, its recorded headers and its body, byte for byte.

    It has the class that Django uses for its status and content, so a redirect has its ``url``.

    :raises OutcomeUnreadableError: the record is damaged.
    :raises BodyGoneError: the body is no longer kept.
    """
    try:
        names = {name.lower(): value for name, value in outcome.headers}
        kind = _class_of(outcome.status, names)
        response = kind.__new__(kind)
        # Don't call the constructor of its own class. It would need the data, or check the address of a redirect again,
        # which was checked when the response was sent.
        HttpResponse.__init__(response, decode_body(outcome.body), status=outcome.status, headers=dict(outcome.headers))
    except UNREADABLE as error:
        raise OutcomeUnreadableError from error
    if "content-type" not in names:
        del response["Content-Type"]  # Django's default, which was not sent
    # Of a TemplateResponse. A decorator that changes it must not fail at a replay.
    response.context_data = {}  # type: ignore[attr-defined]
    return response


def _class_of(status: int, names: Mapping[str, str]) -> type[HttpResponse]:
    if status in _REDIRECTS and "location" in names:
        return HttpResponsePermanentRedirect if status in _PERMANENT_REDIRECTS else HttpResponseRedirect
    if is_json(names.get("content-type", "")):
        return JsonResponse
    return _CLASSES.get(status, HttpResponse)
