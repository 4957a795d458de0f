"""Class-based views: which handlers are protected for which requests, and which declarations are refused.

A handler is protected by ``@idempotent`` on the method, by ``IdempotentMixin``, or because DRF's ``@api_view`` made its
class from a function under ``@idempotent``. ``guard()`` wraps ``as_view()`` of the class, because Django uses the
callable that ``as_view()`` returns. Wrapping ``dispatch()`` would have no effect if another class in the MRO overrides
it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.views import View

from ..identity import keys
from ..operation import Operation
from .adapters import prepare_class
from .atomic_requests import EveryDatabase, Handler, databases_with_atomic_requests, exempted_by_project

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})

#: Methods that the frameworks call before the handler. They ignore the return value, so a replay there would not stop
#: the handler.
HOOKS = frozenset(
    {"setup", "initial", "perform_authentication", "check_permissions", "check_object_permissions", "check_throttles"}
)


def protects_handler(operation: Operation, method: str, served: Collection[str]) -> bool:
    """Whether a request is protected if its handler was declared explicitly.

    It is, whatever its method, with two exceptions: the operation names its methods itself, or the handler serves safe
    and unsafe methods, as an ``@action(methods=["get", "post"])`` does.

    :param served: the methods that lead to the handler; empty if that is not known.
    """
    declared: Collection[str] | None = operation.declared["methods"]
    if declared is not None:
        return method in declared
    if method not in SAFE_METHODS:
        return True
    return bool(served) and (method not in served or SAFE_METHODS.issuperset(served))


def protects_function(operation: Operation, method: str, served: Collection[str]) -> bool:
    """Whether a request to a function is protected. The function may serve any method, so ``methods`` decides.

    :param served: the methods that the function serves, if they are known. If ``METHODS`` leaves out all of them, the
        function is protected like a handler.
    """
    if served and operation.declared["methods"] is None and not set(served) & set(operation.methods):
        return protects_handler(operation, method, served)
    return method in operation.methods


def served_methods(name: str, actions: Mapping[str, str] | None) -> set[str]:
    """The methods that lead to the handler ``name``.

    :param actions: the actions of a ViewSet by method in lower case, or None.
    """
    if actions is not None:
        return {method.upper() for method, action in actions.items() if action == name}
    return {name.upper()} if name in View.http_method_names else set()


def methods_of_class(view_class: Any) -> set[str]:
    """The methods that a class has handlers for. OPTIONS and HEAD are the framework's own."""
    return {name.upper() for name in view_class.http_method_names if hasattr(view_class, name)} - {"OPTIONS", "HEAD"}


def protected_operation(view_class: type, name: str) -> Operation | None:
    """The operation that protects the handler ``name`` of a class."""
    operation = operation_of(getattr(view_class, name, None))
    if operation is not None:
        return operation
    of_mixin = getattr(view_class, "idempotent_operation", None)
    return None if of_mixin is None else of_mixin(name)


def operation_of(handler: object) -> Operation | None:
    """The operation of a handler under ``@idempotent``, even if there are other decorators above it."""
    while handler is not None:
        # functools.wraps copies the attributes of a protected handler.
        operation = getattr(handler, "operation", None)
        if isinstance(operation, Operation):
            return operation
        handler = getattr(handler, "__wrapped__", None)
    return None


def refuse_excluded(operation: Operation, served: Collection[str], where: str) -> None:
    """:raises ImproperlyConfigured: the operation's own ``methods`` leave out every method that is served."""
    declared: Collection[str] | None = operation.declared["methods"]
    if served and declared is not None and not set(served) & set(declared):
        raise ImproperlyConfigured(
            f"Operation {operation.name!r} protects nothing: {where} serves {', '.join(sorted(served))}, and its "
            f"methods are {', '.join(declared)}. Leave methods= out, or name what is served."
        )


def refuse_handler(operation: Operation, view_class: type, name: str) -> None:
    """:raises ImproperlyConfigured: the handler ``name`` of a class can't be protected, or would not be."""
    reason = no_handler(operation, view_class, name)
    if reason is not None:
        raise ImproperlyConfigured(reason)
    refuse_excluded(operation, served_methods(name, None), f"{view_class.__name__}.{name}")


def no_handler(operation: Operation, view_class: type, name: str) -> str | None:
    """Why the method ``name`` of a class can't be protected, or None if it is a handler."""
    declared = f"Operation {operation.name!r} is declared for {view_class.__name__}.{name}"
    if name == "dispatch":
        return (
            f"{declared}, where it would run before authentication and permissions, so a replay would not check them. "
            f"Protect the handler method, such as post()."
        )
    if name in HOOKS:
        return (
            f"{declared}, which is no handler: its answer is ignored, and the handler would run nevertheless. Protect "
            f"the handler method, such as post()."
        )
    return None


def guard(view_class: type) -> None:
    """Wrap ``as_view()`` of a class, so that it checks the declarations and exempts the view from ATOMIC_REQUESTS.

    This is done once per class, and subclasses inherit it. It also works for a mixin without an ``as_view()``.
    """
    if getattr(getattr(view_class, "as_view", None), "_guards", False):
        return
    own = view_class.__dict__.get("as_view")

    def as_view(cls: Any, *args: Any, **initkwargs: Any) -> Any:
        if "idempotent_operations" in initkwargs:
            raise ImproperlyConfigured(
                f"idempotent_operations is an attribute of the class {cls.__name__}, not an argument of as_view()."
            )
        inherited: Any = super(view_class, cls)
        make = inherited.as_view if own is None else own.__get__(None, cls)
        prepare_class(cls)
        view = make(*args, **initkwargs)
        if isinstance(getattr(view, "_non_atomic_requests", None), EveryDatabase):
            return view
        _check_routed_handlers(cls, getattr(view, "actions", None))
        return _exempt(view, cls)

    as_view._guards = True  # type: ignore[attr-defined]
    setattr(view_class, "as_view", classmethod(as_view))  # noqa: B010 - a class of any kind


def _check_routed_handlers(view_class: Any, actions: Mapping[str, str] | None) -> None:
    """Check what only the route knows: the methods that lead to an action of a ViewSet or an ``@api_view`` function."""
    of_function = getattr(view_class, "idempotent_function", None)
    if of_function is not None:
        refuse_excluded(of_function, methods_of_class(view_class), f"@api_view function {view_class.__name__}")
    for name in set((actions or {}).values()):
        operation = protected_operation(view_class, name)
        if operation is not None:
            refuse_excluded(operation, served_methods(name, actions), f"{view_class.__name__}.{name}, as routed,")


def _exempt(view: Callable[..., Any], view_class: type) -> Callable[..., Any]:
    @functools.wraps(view)
    def wrapper(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        if not databases_with_atomic_requests() or _is_protected(view_class, request, getattr(view, "actions", None)):
            return view(request, *args, **kwargs)
        return Handler(functools.partial(view, request, *args, **kwargs), request, wrapper).pass_through()

    if iscoroutinefunction(view):
        markcoroutinefunction(wrapper)
    wrapper._non_atomic_requests = EveryDatabase(exempted_by_project(view))  # type: ignore[attr-defined]
    return wrapper


def operation_of_request(view_class: Any, method: str, actions: Mapping[str, str] | None) -> Operation | None:
    """The operation that protects a request with this method to a class, if it is protected.

    :param actions: the actions of a ViewSet by method in lower case, or None.
    """
    operation: Operation | None = getattr(view_class, "idempotent_function", None)
    if operation is not None:
        served = methods_of_class(view_class)
        return operation if method in served and protects_function(operation, method, served) else None
    name = (actions or {}).get(method.lower(), method.lower())
    if name == "head" and not hasattr(view_class, "head"):
        name = (actions or {}).get("get", "get")  # as Django serves it
    operation = protected_operation(view_class, name)
    if operation is None or not protects_handler(operation, method, served_methods(name, actions)):
        return None
    return operation


def _is_protected(view_class: Any, request: HttpRequest, actions: Mapping[str, str] | None) -> bool:
    operation = operation_of_request(view_class, request.method or "", actions)
    return operation is not None and (operation.required or may_have_key(operation, request))


def may_have_key(operation: Operation, request: HttpRequest) -> bool:
    """Whether a request has a key, as far as its headers tell. The operation's own ``key`` may read the body."""
    return operation.key is not None or keys.META_NAME in request.META
