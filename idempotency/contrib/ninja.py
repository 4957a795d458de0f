"""Django Ninja: the adapter with which ``@idempotent`` protects a route, and the route's description in Ninja's schema.

Ninja authenticates, throttles and validates before it calls the handler, and therefore before a replay. Its refusals
are never recorded.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from .. import foreign
from . import needing

with needing("ninja"):
    from ninja.decorators import decorate_view
    from ninja.operation import Operation as Route
    from ninja.operation import PathView
    from ninja.utils import contribute_operation_callback

    if not hasattr(Route, foreign.RESULT_TO_RESPONSE):  # private, so another release may lack it
        raise ImportError("idempotency.contrib.ninja needs a release of Django Ninja that it was tested with")

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.urls import ResolverMatch

from ..conf import settings
from ..http.adapter import Adapter, register
from ..http.problems import PROFILES
from ..http.protection import RoutedHandler, protects_function
from ..http.stack import instance_within
from ..identity import keys
from ..operation import Operation
from ..views.decorators import refuse_excluded
from .openapi import PROBLEMS, add_responses, key_parameter

#: The attribute of Django's request for Ninja's operation.
_OPERATION = "_idempotency_ninja_operation"


@register
class NinjaAdapter(Adapter):
    def __init__(self, request: Any) -> None:
        super().__init__(request)
        self.route: Any = getattr(request, _OPERATION)

    @classmethod
    def speaks_for(cls, request: object) -> bool:
        return isinstance(request, HttpRequest) and hasattr(request, _OPERATION)

    @classmethod
    def prepare_view(cls, view: Any) -> None:
        contribute_operation_callback(view, functools.partial(_declare, view.operation))
        decorate_view(_remember_operation)(view)

    @classmethod
    def handlers_of(cls, callback: Any) -> list[RoutedHandler] | None:
        view = instance_within(callback, PathView)  # Ninja wraps the view of a path in a function
        if view is None:
            return None
        # decorate_view() decorates the route's run().
        return [
            RoutedHandler(foreign.function_of(route), frozenset(route.methods), caller=foreign.run_of(route))
            for route in foreign.operations_of(view)
        ]

    def served_methods(self, name: str) -> Collection[str]:
        return set(self.route.methods)

    def is_place_named(self, match: ResolverMatch) -> bool:
        # Otherwise Ninja names a pattern after its function, which may serve several paths.
        return match.url_name is not None and match.url_name == getattr(self.route, "url_name", None)

    def render(self, answer: Any) -> Any:
        # The handler may have set headers on the response that it received as a parameter.
        response = self.kwargs.get(foreign.response_argument(self.route))
        if response is None:
            response = foreign.create_response(self.route)(self.request)
        return super().render(getattr(self.route, foreign.RESULT_TO_RESPONSE)(self.request, answer, response))

    def answer_to_exception(self, error: Exception) -> Any | None:
        try:
            return foreign.on_exception(self.route)(self.request, error)
        except Exception as unhandled:
            if unhandled is not error:
                raise
        return super().answer_to_exception(error)  # an error unknown to Ninja, which Django may handle


def _remember_operation(run: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate an operation's ``run()``. Ninja also decorates each copy of the operation."""
    operation = getattr(inspect.unwrap(run), "__self__", None)
    if operation is None:
        raise ImproperlyConfigured(
            "A decorator in decorate_view() below @idempotent hides Ninja's operation. Use functools.wraps() in it, or "
            "put decorate_view() above @idempotent."
        )

    @functools.wraps(run)
    def remembering(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        setattr(request, _OPERATION, operation)
        return run(request, *args, **kwargs)

    return remembering


def _declare(operation: Operation, route: Any) -> None:
    """Check and describe a route under ``@idempotent``. Ninja calls this when the route is declared.

    :raises ImproperlyConfigured: the route can't be protected, or would not be.
    """
    refuse_excluded(operation, route.methods, f"route {route.path!r}")
    if getattr(route, foreign.STREAM_FORMAT, None) is not None:
        raise ImproperlyConfigured(
            f"Operation {operation.name!r} is declared for route {route.path!r}, which streams its response. A stream "
            f"can't be recorded. Return a response with rebuild= instead."
        )
    # Ignore a wrong setting: the system checks report it, but could not run if this raised.
    with suppress(ImproperlyConfigured):
        _describe(operation, route)


def _describe(operation: Operation, route: Any) -> None:
    """Add the header and the responses to the schema of a route, unless one of its methods is not protected.

    Ninja describes all methods of a route together. The project's descriptions are kept.
    """
    if not all(protects_function(operation, method, route.methods) for method in route.methods):
        return
    described = copy.deepcopy(foreign.description(route) or {})
    if not _declares_header(described, route):
        described["parameters"] = [key_parameter(operation), *described.get("parameters", [])]
    own = _by_number(described.get("responses", {}))
    responses = {status: own.get(status, {}) for status in (*own, *foreign.response_models(route)) if status is not ...}
    # Inline, because the components of Ninja's schema can only be models.
    profile = operation.policy.profile
    name, schema = PROBLEMS[profile]
    problem = {PROFILES[profile].content_type: {"schema": {"title": name, **schema}}}
    add_responses(operation, responses, problem if settings().error_response is None else None)
    foreign.set_description(route, {**described, "responses": _by_number(responses)})


def _by_number(responses: Mapping[Any, Any]) -> dict[Any, Any]:
    """The responses with integer statuses, as in Ninja. Strings could not be merged or sorted with them."""
    return {int(status) if str(status).isdigit() else status: response for status, response in responses.items()}


def _declares_header(described: dict[str, Any], route: Any) -> bool:
    declared = {str(parameter.get("name", "")).lower() for parameter in described.get("parameters", [])}
    for model in foreign.parameters(route):
        if foreign.parameter_source(model) == "header":
            declared |= {name.lower().replace("_", "-") for name in foreign.parameter_names(model)}
    return keys.HEADER.lower() in declared
