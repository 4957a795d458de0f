"""The operation that protects a handler, and the requests that it protects.

A handler is protected if it is a ``Protection``, or a decorator that holds one in a closure or an attribute, and so can
call it. A copied attribute proves nothing, because ``functools.wraps()`` also copies it to a function that never calls
the handler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from types import CodeType, FunctionType, MethodType
from typing import Any

from django.db.transaction import Atomic, atomic
from django.views.decorators.http import condition
from django.views.generic.edit import ProcessFormView

from ..operation import Operation, registry

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})


class Protection:
    """The unprotected handler ``view`` under an operation. ``@idempotent`` makes it."""

    def __init__(self, operation: Operation, view: Callable[..., Any]) -> None:
        self.operation = operation
        self.view = view
        registry.note_handler(operation)


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
    return next((layer for layer in decorator_stack(handler) if isinstance(layer, Protection)), None)


def decorator_stack(handler: object) -> Iterator[Any]:
    """A handler, the function that it decorates, and so on inwards, as long as each holds the next one."""
    layer: Any = handler
    while layer is not None:
        yield layer
        if isinstance(layer, (functools.partial, MethodType)):
            layer = next(held_by(layer))
        else:
            inner = getattr(layer, "__wrapped__", None)
            layer = inner if inner is not None and _holds(layer, inner) else None


def class_of(callback: object) -> Any:
    """The class of a view that ``as_view()`` made, even below decorators; or None."""
    for layer in decorator_stack(callback):
        if isinstance(layer, FunctionType):
            named = getattr(layer, "cls", getattr(layer, "view_class", None))
            if named is not None and any(value is named for value in held_by(layer)):
                return named
    return None


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


def is_within_atomic(outermost: Iterable[Any]) -> bool:
    """Whether ``atomic()`` is among the decorators above the protection, where no claim can be committed.

    :param outermost: the result of ``around``.
    """
    return any(part is atomic or isinstance(part, Atomic) for part in _parts_above(outermost))


def is_within_precondition(outermost: Iterable[Any]) -> bool:
    """Whether ``condition``, ``etag`` or ``last_modified`` is among the decorators above the protection.

    There they refuse the retry of an executed request, because the operation changes the value that ``If-Match`` is
    compared with.
    """
    return any(getattr(part, "__code__", None) in PRECONDITION for part in _parts_above(outermost))


def _parts_above(outermost: Iterable[Any]) -> Iterator[Any]:
    """The decorators above the protection, and the values that they hold."""
    for outer in outermost:
        for layer in takewhile(lambda layer: not isinstance(layer, Protection), decorator_stack(outer)):
            yield layer
            for value in held_by(layer):
                yield from value if isinstance(value, (list, tuple)) else [value]


def _codes_within(code: CodeType) -> Iterator[CodeType]:
    """The code objects of the functions that a function creates."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes_within(constant)


#: The wrappers of ``condition()``, by code, because ``functools.wraps()`` gives them the view's name.
PRECONDITION = frozenset(_codes_within(condition.__code__))


def held_by(layer: Any) -> Iterator[Any]:
    """The values, besides globals, that a function, a method, a partial or an object can call."""
    if isinstance(layer, functools.partial):
        yield layer.func
    elif isinstance(layer, MethodType):
        yield layer.__func__
    elif isinstance(layer, FunctionType):
        for cell in layer.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:
                continue  # not assigned yet
    else:
        # functools.update_wrapper() sets __wrapped__ even if the object never calls it.
        yield from (value for name, value in getattr(layer, "__dict__", {}).items() if name != "__wrapped__")


def _holds(layer: Any, inner: object) -> bool:
    """Whether a decorator holds the function that it decorates, directly or in a function that it holds."""
    if type(layer) is not layer.__class__:
        return True  # a proxy, such as wrapt's
    waiting: list[Any] = [layer]
    seen: list[Any] = []
    while waiting:
        for value in held_by(waiting.pop()):
            if value is inner:
                return True
            can_hold = isinstance(value, (FunctionType, functools.partial, MethodType))
            if can_hold and not any(value is known for known in seen):
                seen.append(value)
                waiting.append(value)
    return False
