"""The operation that protects a handler, and the requests that it protects.

A handler is protected if it is a ``Protection``, or a decorator that holds one, and so can call it. A copied attribute
proves nothing, because ``functools.wraps()`` also copies it to a function that never calls the handler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from django.views.generic.edit import ProcessFormView

from ..operation import Operation
from .stack import decorator_stack

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})


class Protection:
    """The unprotected handler ``view`` under an operation. ``@idempotent`` makes it."""

    def __init__(self, operation: Operation, view: Callable[..., Any]) -> None:
        self.operation = operation
        self.view = view


@dataclass(frozen=True)
class RoutedHandler:
    """A function or a method of a class to which a URL leads."""

    handler: Any
    #: The methods that lead to it; empty if unknown.
    methods: frozenset[str] = frozenset()
    #: The attribute of its class; empty for a function.
    name: str = ""
    #: A callable of the framework that calls it, and that the project may have decorated.
    caller: Any = None

    @property
    def operation(self) -> Operation | None:
        """The operation that protects it for some method."""
        protection = protection_of(self.handler)
        return None if protection is None else protection.operation

    def operation_for(self, method: str) -> Operation | None:
        """The operation that protects a request with this method."""
        operation = self.operation
        protects = protects_handler if self.name else protects_function
        return operation if operation is not None and protects(operation, method, self.methods) else None


def protects_handler(operation: Operation, method: str, served: Collection[str]) -> bool:
    """Whether a request to a method of a class is protected. It isn't if the operation's ``methods`` leave it out, or
    if it is safe and the handler also serves unsafe methods, as with ``@action(methods=["get", "post"])``.

    :param served: the methods that lead to the handler; empty if unknown.
    """
    declared: Collection[str] | None = operation.declared["methods"]
    if declared is not None:
        return method in declared
    if method not in SAFE_METHODS:
        return True
    return bool(served) and (method not in served or SAFE_METHODS.issuperset(served))


def protects_function(operation: Operation, method: str, served: Collection[str]) -> bool:
    """Whether a request to a function is protected. The function may serve any method, so ``methods`` decides.

    :param served: the methods that the function serves, if known. If ``METHODS`` contains none of them, the function is
        protected like a handler. The framework answers other methods with 405, so they claim nothing.
    """
    if served and operation.declared["methods"] is None and not set(served) & set(operation.policy.methods):
        return protects_handler(operation, method, served)
    return method in operation.policy.methods and (not served or method in served)


def protection_of(handler: object) -> Protection | None:
    """The protection of a handler, even if there are decorators above it."""
    return next((layer for layer in decorator_stack(handler) if issubclass(type(layer), Protection)), None)


def handlers_of_class(view_class: Any) -> list[RoutedHandler]:
    """The handlers of a class, found by their names, like in Django."""
    names = [name for name in view_class.http_method_names if hasattr(view_class, name)]
    methods = {name: frozenset({name.upper()}) for name in names}
    if "get" in names and "head" not in names:  # as Django serves HEAD
        methods["get"] |= {"HEAD"}
    if getattr(view_class, "put", None) is ProcessFormView.put and {"post", "put"} <= methods.keys():  # it calls post()
        methods["post"] |= methods.pop("put")
    return [RoutedHandler(getattr(view_class, name), methods[name], name) for name in methods]


def methods_of_class(view_class: Any) -> set[str]:
    """The methods for which a class has handlers, without the framework's OPTIONS."""
    return {method for routed in handlers_of_class(view_class) for method in routed.methods} - {"OPTIONS"}


def around(callback: Any, view_class: Any, routed: RoutedHandler) -> list[Any]:
    """The callables that a request passes on its way to a handler, each of which may be decorated."""
    methods = [getattr(view_class, "dispatch", None)] if routed.name else []
    return [callback, *methods, routed.caller, routed.handler]
