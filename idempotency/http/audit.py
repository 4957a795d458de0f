"""``audit``: every mutating route of the project, and whether its protection holds.

It reads the URLconf and the views, and calls none of them. ``decorators_of`` in ``layers`` finds what is around a view.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from django.conf import settings as django_settings
from django.contrib.admindocs.utils import (
    remove_non_capturing_groups,
    replace_metacharacters,
    replace_named_groups,
    replace_unnamed_groups,
)
from django.urls import URLPattern, URLResolver, get_resolver
from django.urls.resolvers import LocalePrefixPattern, RegexPattern
from django.utils import translation
from django.views import View
from django.views.generic import RedirectView

from ..conf import settings
from ..operation import Operation
from .adapters import handlers_of
from .atomic_requests import databases_with_atomic_requests
from .checks import model_written_elsewhere
from .class_views import (
    HOOKS,
    SAFE_METHODS,
    methods_of_class,
    no_handler,
    operation_of,
    operation_of_request,
    protects_function,
)
from .layers import Stack, class_of, declared_methods, layers_of


class Verdict(str, Enum):
    """What the audit says about a method of a route."""

    PROTECTED = "protected"
    BROKEN = "broken"  # an operation is declared, but the protection does not hold
    DOUBTFUL = "doubtful"  # it holds, unless what is named in the reasons has an effect or checks a permission
    UNPROTECTED = "unprotected"
    UNDECLARED = "undeclared"  # an unprotected view that doesn't say which methods it serves
    IDEMPOTENT = "idempotent"  # PUT or DELETE, which HTTP defines as idempotent, without protection
    ALLOWED = "allowed"  # not protected, and the project says that this is intended

    __str__ = str.__str__


@dataclass(frozen=True)
class AuditedRoute:
    """One mutating method of one route."""

    method: str
    """In capitals; "ANY" for a view that doesn't say which methods it serves."""

    route: str
    """The path, with names in angle brackets in the place of its variable parts."""

    name: str
    """The name of the URL with its namespaces; empty if it has none."""

    view: str
    """The dotted path of the function, or of the class and its handler."""

    verdict: Verdict
    operation: Operation | None = None
    reasons: tuple[str, ...] = ()
    """Sentences that explain the verdict."""

    def as_dict(self) -> dict[str, Any]:
        """The route as JSON. ``operation``, ``recovery``, ``transaction`` and ``required`` are None if unprotected."""
        operation = self.operation
        return {
            "method": self.method,
            "route": self.route,
            "name": self.name,
            "view": self.view,
            "verdict": str(self.verdict),
            "operation": None if operation is None else operation.name,
            "recovery": None if operation is None else operation.recovery.value,
            "transaction": None if operation is None else operation.transaction,
            "required": None if operation is None else operation.required,
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True)
class Audit:
    """The result of ``audit``."""

    routes: tuple[AuditedRoute, ...]
    admin_routes: int
    """How many routes of Django's admin were left out."""

    unused: tuple[str, ...]
    """The patterns of ``allow`` that no route matched."""


def audit(*, allow: Collection[str] = (), include_admin: bool = False) -> Audit:
    """Look at every mutating method of every route of ``ROOT_URLCONF``.

    :param allow: patterns as of a shell, for a route's path, its name or its view. An unprotected route that matches
        one is allowed.
    :param include_admin: whether routes of Django's admin are looked at, too.
    :raises ImproperlyConfigured: the project's URLs can't be read.
    """
    found: list[AuditedRoute] = []
    seen: set[tuple[object, ...]] = set()
    left_out, used = 0, set()
    # The texts of translated routes are those of the project's own language.
    with translation.override(django_settings.LANGUAGE_CODE):
        for place in _places(get_resolver().url_patterns):
            if place.in_admin and not include_admin:
                left_out += 1
                continue
            identity = (place.name, id(place.callback))
            if "format" in place.parameters and identity in seen:
                continue  # Django REST framework's second route to the same view
            seen.add(identity)
            for route in _routes_of(place):
                matching = {pattern for pattern in allow if _matches(pattern, route)}
                used |= matching
                intended = matching and route.verdict in {Verdict.UNPROTECTED, Verdict.UNDECLARED}
                found.append(replace(route, verdict=Verdict.ALLOWED) if intended else route)
    return Audit(tuple(found), left_out, tuple(pattern for pattern in allow if pattern not in used))


@dataclass(frozen=True)
class _Place:
    """A URL pattern within the patterns that include it."""

    route: str
    name: str
    callback: Any
    parameters: frozenset[str]
    in_admin: bool


def _places(
    patterns: Iterable[URLPattern | URLResolver],
    route: str = "/",
    namespaces: Sequence[str] = (),
    parameters: frozenset[str] = frozenset(),
    in_admin: bool = False,
) -> Iterator[_Place]:
    for pattern in patterns:
        here = route + _text_of(pattern.pattern)
        names = parameters | set(pattern.pattern.converters) | set(_groups_of(pattern.pattern))
        if isinstance(pattern, URLResolver):
            inner = [*namespaces, pattern.namespace] if pattern.namespace else namespaces
            yield from _places(pattern.url_patterns, here, inner, names, in_admin or _is_admin(pattern))
        else:
            name = ":".join([*namespaces, pattern.name]) if pattern.name else ""
            yield _Place(here, name, pattern.callback, names, in_admin)


def _is_admin(resolver: URLResolver) -> bool:
    """Whether these are the URLs of an ``AdminSite``. A project's own URLs may have its name."""
    return resolver.app_name == "admin" and any(
        hasattr(getattr(one, "callback", None), "admin_site") for one in resolver.url_patterns
    )


def _text_of(pattern: Any) -> str:
    if isinstance(pattern, LocalePrefixPattern):
        return "<language>/"
    if not isinstance(pattern, RegexPattern):
        return str(pattern)
    simplified = replace_unnamed_groups(replace_named_groups(remove_non_capturing_groups(str(pattern))))
    return replace_metacharacters(simplified).replace("\\", "")


def _groups_of(pattern: Any) -> Collection[str]:
    return pattern.regex.groupindex if isinstance(pattern, RegexPattern) else ()


def _routes_of(place: _Place) -> Iterator[AuditedRoute]:
    made = next((layer for layer in layers_of(place.callback) if class_of(layer) is not None), None)
    if made is not None:
        yield from _routes_of_class(place, made, class_of(made))
        return
    handlers = handlers_of(place.callback)
    if handlers is None:
        handlers = [(declared_methods(place.callback), place.callback)]
    for methods, handler in handlers:
        yield from _routes_of_function(place, handler, methods)


def _routes_of_class(place: _Place, made: Any, view_class: Any) -> Iterator[AuditedRoute]:
    """:param made: what ``as_view()`` made. Decorators may be around it."""
    actions = getattr(made, "actions", None)
    arguments = getattr(made, "initkwargs", getattr(made, "view_initkwargs", {}))
    misplaced = _misplaced(view_class)
    around = operation_of(made)  # @idempotent around as_view()
    served = methods_of_class(view_class) if actions is None else {method.upper() for method in actions}
    if not served and view_class.dispatch is not View.dispatch:
        reason = "The class has no handlers, so its dispatch() may serve any method."
        yield _undeclared(place, _handler(view_class, "dispatch"), reason)
    served &= {name.upper() for name in arguments.get("http_method_names", view_class.http_method_names)}
    served &= set(declared_methods(place.callback)) or served
    for method in sorted(served - SAFE_METHODS):
        name = (actions or {}).get(method.lower(), method.lower())
        if getattr(view_class, name) is getattr(RedirectView, name, None):
            continue  # it has no effect
        if misplaced is not None:
            refused, reason = misplaced
            view = _handler(view_class, name)
            yield AuditedRoute(method, place.route, place.name, view, Verdict.BROKEN, refused, (reason,))
            continue
        if around is not None:
            operation = around if protects_function(around, method, served) else None
            stack = Stack.of(place.callback)
        else:
            operation = operation_of_request(view_class, method, actions)
            stack = Stack.of_handler(view_class, name, place.callback)
        route = AuditedRoute(
            method, place.route, place.name, _handler(view_class, name), Verdict.UNPROTECTED, operation
        )
        permissions = arguments.get("permission_classes", getattr(view_class, "permission_classes", ()))
        doubts = [*_elsewhere(view_class, operation), *_object_permissions(permissions, place)]
        yield _judged(route, place, stack, doubts)


def _routes_of_function(place: _Place, handler: Any, methods: Collection[str]) -> Iterator[AuditedRoute]:
    stack = Stack.of(handler)
    view, operation = _dotted(stack.view), stack.operation
    if not methods:
        methods = () if operation is None else operation.methods
        if not set(settings.methods) <= set(methods):
            reason = "The function doesn't say which methods it serves. Use require_POST, require_safe or the like."
            yield _undeclared(place, view, reason)
    for method in sorted(set(methods) - SAFE_METHODS):
        protecting = operation if operation is not None and protects_function(operation, method, methods) else None
        route = AuditedRoute(method, place.route, place.name, view, Verdict.UNPROTECTED, protecting)
        yield _judged(route, place, stack, [])


def _undeclared(place: _Place, view: str, reason: str) -> AuditedRoute:
    return AuditedRoute("ANY", place.route, place.name, view, Verdict.UNDECLARED, None, (reason,))


def _misplaced(view_class: Any) -> tuple[Operation, str] | None:
    """An operation of a method that is no handler, and why it is refused.

    ``method_decorator`` hides it from the class, so it is refused only when a request comes.
    """
    for name in ("dispatch", *sorted(HOOKS)):
        operation = operation_of(getattr(view_class, name, None))
        if operation is not None:
            return operation, str(no_handler(operation, view_class, name))
    return None


def _judged(route: AuditedRoute, place: _Place, stack: Stack, doubts: Iterable[str]) -> AuditedRoute:
    operation = route.operation
    if operation is None:
        return route if route.method in settings.methods else replace(route, verdict=Verdict.IDEMPOTENT)
    mistakes, doubts = [*stack.mistakes(), *_hidden_from_atomic_requests(place)], [*stack.doubts(), *doubts]
    notes = [] if operation.required else ["A request without a key runs unprotected (required=False)."]
    verdict = Verdict.BROKEN if mistakes else Verdict.DOUBTFUL if doubts else Verdict.PROTECTED
    return replace(route, verdict=verdict, reasons=(*mistakes, *doubts, *notes))


def _hidden_from_atomic_requests(place: _Place) -> list[str]:
    if set(databases_with_atomic_requests()) <= getattr(place.callback, "_non_atomic_requests", set()):
        return []
    reason = (
        "ATOMIC_REQUESTS opens a transaction around the view, where no claim can be committed: every request is "
        "refused. Put @idempotent directly on the function or method, without method_decorator() or another decorator "
        "that hides it, or mark the outermost view with transaction.non_atomic_requests."
    )
    return [reason]


def _elsewhere(view_class: Any, operation: Operation | None) -> list[str]:
    if operation is None or not operation.transaction:
        return []
    model = model_written_elsewhere(view_class, operation)
    if model is None:
        return []
    return [f"{model._meta.label} is written to another database than the records, outside of the transaction."]


def _object_permissions(permissions: Iterable[Any], place: _Place) -> list[str]:
    """Permissions of Django REST framework that a handler checks itself, when it calls ``get_object()``."""
    if not place.parameters - {"format"}:
        return []
    found = {
        permission.__name__
        for permission in _flat(permissions)
        if hasattr(permission, "has_object_permission")
        and not permission.has_object_permission.__qualname__.startswith("BasePermission.")
    }
    return [
        f"{name}.has_object_permission() is checked by get_object(), within the handler, so not before a replay."
        for name in sorted(found)
    ]


def _flat(permissions: Iterable[Any]) -> Iterator[Any]:
    for permission in permissions:
        operands = [getattr(permission, name) for name in ("op1_class", "op2_class") if hasattr(permission, name)]
        if operands:  # of an expression such as IsOwner | IsAdminUser
            yield from _flat(operands)
        else:
            yield permission


def _matches(pattern: str, route: AuditedRoute) -> bool:
    return any(fnmatchcase(text, pattern) for text in (route.route, route.name, route.view))


def _handler(view_class: Any, name: str) -> str:
    view = f"{view_class.__module__}.{view_class.__name__}"
    # Django REST framework's @api_view makes a class, and gives it the name of the function.
    return f"{view}.{name}" if view_class.__qualname__.endswith(view_class.__name__) else view


def _dotted(view: Any) -> str:
    named: Callable[..., Any] = view if hasattr(view, "__qualname__") else type(view)
    return f"{named.__module__}.{named.__qualname__}"
