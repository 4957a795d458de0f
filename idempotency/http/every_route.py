"""The routes of the project, and ``EVERY_ROUTE``, which protects the unsafe ones for the requests that bring a key.

The handlers get the same protection as under ``@idempotent``, in the same place: closest to the function, below login
and permissions. Nothing of the project is changed for that. A class-based view is routed through a subclass whose
handlers are protected, and the decorators of a function are made again around the protected function. A route for which
that can't be done stays as it is, and the audit says so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from types import CellType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from django.conf import settings as django_settings
from django.contrib.admindocs.utils import (
    remove_non_capturing_groups,
    replace_metacharacters,
    replace_named_groups,
    replace_unnamed_groups,
)
from django.core.exceptions import ImproperlyConfigured
from django.urls import URLPattern, URLResolver, get_resolver
from django.urls.resolvers import LocalePrefixPattern, RegexPattern
from django.utils import translation

from ..conf import settings
from ..operation import Operation
from ..options.validators import MAX_NAME_LENGTH
from .adapter import Adapter, adapters, handlers_of
from .decorators import Protected, dotted, guard, inherited
from .handler import EveryDatabase, exempted_by_project
from .protection import RoutedHandler, class_of, decorator_stack, held_by, is_within_atomic

UNSAFE = ("POST", "PUT", "PATCH", "DELETE")

#: The resolvers whose routes are protected already, and why a route of theirs is not.
protected_resolvers: WeakSet[URLResolver] = WeakSet()
lock: threading.Lock = threading.Lock()
reasons_left_out: WeakKeyDictionary[URLPattern, str] = WeakKeyDictionary()


@dataclass(frozen=True)
class Place:
    """A URL pattern within the patterns that include it."""

    #: The path, with names in angle brackets in the place of its variable parts.
    route: str
    #: Its name with its namespaces; empty if it has none.
    name: str
    callback: Any
    parameters: frozenset[str]
    in_admin: bool
    pattern: URLPattern


class ByRoute(Protected):
    """A handler that ``EVERY_ROUTE`` protects, while it is set: a test may set it for itself only."""

    def _protects(self, instance: object, adapter: Adapter) -> bool:
        return settings().every_route and adapter.request.method in self.operation.policy.methods


def places() -> Iterator[Place]:
    """The URL patterns of the project, with the protection that ``EVERY_ROUTE`` gives them."""
    if getattr(django_settings, "ROOT_URLCONF", None):  # a project may have no URLs
        resolver = get_resolver()
        with suppress(ImproperlyConfigured):  # the checks report a wrong setting, and could not run if this raised
            protect_every_route(resolver)
        yield from _places(resolver.url_patterns)


def protect_every_route(resolver: URLResolver) -> None:
    """Protect the routes of a URLconf once, if ``EVERY_ROUTE`` is set."""
    if not settings().every_route or resolver in protected_resolvers:
        return
    # No request is served before all routes are protected. The paths of translated routes are those of the project's
    # own language, so that an operation has one name in all processes.
    with lock, translation.override(django_settings.LANGUAGE_CODE):
        if resolver not in protected_resolvers:
            every = [*_places(resolver.url_patterns)]
            # An include() that is used twice has the same patterns in both places.
            excepted = {place.pattern for place in every if place.in_admin or _is_excepted(place)}
            ambiguous = _ambiguous_names(every)
            for place in every:
                if place.pattern not in excepted:
                    _protect(place, place.route if place.name in ambiguous else place.name or place.route)
                elif not place.in_admin and not _is_excepted(place):
                    reasons_left_out[place.pattern] = "The same pattern is included in an excepted place, too."
            protected_resolvers.add(resolver)


def _is_excepted(place: Place) -> bool:
    names = (place.route, place.name, dotted(class_of(place.callback) or [*decorator_stack(place.callback)][-1]))
    return any(fnmatchcase(name, pattern) for name in names for pattern in settings().except_routes)


def _ambiguous_names(every: Iterable[Place]) -> set[str]:
    """The names that several views have. One operation of all of them would answer for one view what another did."""
    first: dict[str, object] = {}
    return {place.name for place in every if first.setdefault(place.name, _view(place)) != _view(place)}


def _view(place: Place) -> tuple[object, ...]:
    """What is the same for patterns that lead to one view. DRF's routes with and without a format do."""
    view_class = class_of(place.callback)
    if view_class is None:
        return ([*decorator_stack(place.callback)][-1],)
    view = _made_by(view_class, place.callback)
    return view_class, _arguments(view), getattr(view, "actions", None)


def _made_by(view_class: Any, callback: Any) -> Any:
    """The function that ``as_view()`` of the class has made, below the decorators."""
    return next(layer for layer in decorator_stack(callback) if any(held is view_class for held in held_by(layer)))


def _arguments(view: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = view.initkwargs if hasattr(view, "initkwargs") else view.view_initkwargs
    return arguments


def _protect(place: Place, name: str) -> None:
    handlers = [
        routed
        for routed in handlers_of(place.callback)
        if routed.operation is None and (not routed.methods or not routed.methods.isdisjoint(UNSAFE))
    ]
    if not handlers:
        return
    operation = Operation(f"route:{name}"[:MAX_NAME_LENGTH], required=False, methods=UNSAFE)
    try:
        if any(adapter.protect_in_place(place.callback, partial(ByRoute, operation)) for adapter in adapters):
            return
        place.pattern.callback = _protected(place.callback, handlers, operation)
    except Exception as error:  # noqa: BLE001 - a class may refuse a subclass or as_view() by any error
        reasons_left_out[place.pattern] = str(error)


def _protected(callback: Any, handlers: list[RoutedHandler], operation: Operation) -> Any:
    """:raises LookupError: a decorator can't be made again, or opens a transaction where no claim can be committed."""
    layers, view_class = [*decorator_stack(callback)], class_of(callback)
    if view_class is None:
        inner = layers[-1]
        protected: Any = ByRoute(operation, inner)
    else:
        inner = _made_by(view_class, callback)
        protected = _view_of_subclass(inner, view_class, handlers, operation)
    if is_within_atomic([callback, getattr(view_class, "dispatch", None), *(routed.handler for routed in handlers)]):
        raise LookupError("transaction.atomic is around the handler.")
    outer = _made_again(layers[: layers.index(inner)], protected)
    if outer is not protected:
        outer._non_atomic_requests = EveryDatabase(protected._non_atomic_requests.view, exempted_by_project(callback))
    return outer


def _view_of_subclass(view: Any, view_class: Any, handlers: list[RoutedHandler], operation: Operation) -> Any:
    names = {name: getattr(view_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    subclass: Any = type(view_class.__name__, (view_class,), names)
    for routed in handlers:
        # The function below @api_view is called by methods of its class.
        for name in [routed.name] if routed.name else sorted(method.lower() for method in routed.methods):
            if name.upper() in UNSAFE or routed.name:
                setattr(subclass, name, ByRoute(operation, inherited(subclass, name, getattr(subclass, name))))
    guard(subclass)
    arguments, actions = _arguments(view), getattr(view, "actions", None)
    made = subclass.as_view(**arguments) if actions is None else subclass.as_view(actions, **arguments)
    for name, value in vars(view).items():  # such as csrf_exempt
        vars(made).setdefault(name, value)
    return made


def _made_again(decorators: list[Any], view: Any) -> Any:
    """The decorators, the outermost first, around the protected view, each a copy of its function.

    :raises LookupError: one is no function, or does not hold what it decorates itself.
    """
    for layer in reversed(decorators):
        inner = layer.__wrapped__ if hasattr(layer, "__wrapped__") else None
        if not isinstance(layer, FunctionType) or inner is None or not any(held is inner for held in held_by(layer)):
            raise LookupError(f"The decorator {dotted(layer)} can't be put around the protected function.")
        cells = [CellType(view) if _holds(cell, inner) else cell for cell in layer.__closure__ or ()]
        again = FunctionType(layer.__code__, layer.__globals__, layer.__name__, layer.__defaults__, tuple(cells))
        again.__kwdefaults__ = layer.__kwdefaults__
        again.__module__, again.__qualname__, again.__doc__ = layer.__module__, layer.__qualname__, layer.__doc__
        # functools.wraps() has copied attributes of the unprotected view, such as its class, which schema generators
        # read. Those of the protected view take their place.
        copied = {name for name, value in getattr(inner, "__dict__", {}).items() if vars(layer).get(name) is value}
        vars(again).update(vars(layer), __wrapped__=view)
        vars(again).update({name: value for name, value in vars(view).items() if name in copied})
        view = again
    return view


def _holds(cell: CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:
        return False  # not assigned yet


def _places(
    patterns: Iterable[URLPattern | URLResolver],
    route: str = "/",
    namespaces: Sequence[str] = (),
    parameters: frozenset[str] = frozenset(),
    in_admin: bool = False,
) -> Iterator[Place]:
    for pattern in patterns:
        here = route + _text_of(pattern.pattern)
        names = parameters | set(pattern.pattern.regex.groupindex)
        if isinstance(pattern, URLResolver):
            inner = [*namespaces, pattern.namespace] if pattern.namespace else namespaces
            # A project's own URLs may have the admin's name, but not its views.
            is_admin = pattern.app_name == "admin" and any(
                hasattr(route.callback, "admin_site") for route in pattern.url_patterns
            )
            yield from _places(pattern.url_patterns, here, inner, names, in_admin or is_admin)
        else:
            name = ":".join([*namespaces, pattern.name]) if pattern.name else ""
            yield Place(here, name, pattern.callback, names, in_admin, pattern)


def _text_of(pattern: Any) -> str:
    if isinstance(pattern, LocalePrefixPattern):
        return "<language>/"
    if not isinstance(pattern, RegexPattern):
        return str(pattern)
    simplified = replace_unnamed_groups(replace_named_groups(remove_non_capturing_groups(str(pattern))))
    return replace_metacharacters(simplified).replace("\\", "")
