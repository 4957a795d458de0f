"""View classes: which handlers a class has and protects.

A class comes from ``IdempotentMixin``, whose mapping names the protected handlers, or from ``@api_view``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.views import View
from rest_framework.views import APIView

from ...http.decorators import Protected, guard, inherited
from ...http.protection import RoutedHandler, handlers_of_class, held_by, methods_of_class, protection_of
from ...operation import Operation, operation_for, registry


# This is not a docstring, because API schemas and DRF's own pages would show it as the description of views without
# one.
#
# The mixin protects the handlers of an APIView or a ViewSet that ``idempotent_operations`` names. Its keys are the
# actions of a ViewSet or the methods of an APIView in lower case. Its values are names or ``Operation`` objects.
#
# The handlers are protected on the class when it is made. So the position of the mixin among the bases does not matter,
# nor does an override of ``initial()`` or ``dispatch()``. A subclass that overrides a handler has its own protected.
class IdempotentMixin:
    idempotent_operations: ClassVar[Mapping[str, str | Operation]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not isinstance(cls.idempotent_operations, Mapping):
            raise ImproperlyConfigured(
                f"{cls.__name__}.idempotent_operations must map the names of handlers to operations, not be "
                f"{cls.idempotent_operations!r}."
            )
        for name, declaration in cls.idempotent_operations.items():
            _protect(cls, name, declaration)
        guard(cls)


class _ByMixin(Protected):
    """A handler that the mixin protects. A subclass may give it to another operation."""


def _protect(cls: type[IdempotentMixin], name: str, declaration: str | Operation) -> None:
    """:raises ImproperlyConfigured: the handler can't be protected, or has another operation by its decorator."""
    operation = operation_for(declaration, {})
    handler = getattr(cls, name, None)
    if handler is None and issubclass(cls, View):
        raise ImproperlyConfigured(
            f"{cls.__name__}.idempotent_operations names {name!r}, but {cls.__name__} has no such handler."
        )
    declared = protection_of(handler)
    if handler is not None and (declared is None or declared.operation.name != operation.name):
        if isinstance(handler, _ByMixin):
            view = handler.view
        elif declared is not None:
            raise ImproperlyConfigured(
                f"{cls.__name__}.idempotent_operations gives {name!r} to operation {operation.name!r}, but @idempotent "
                f"on the method gives it to {declared.operation.name!r}. Remove one of the two."
            )
        else:
            view = handler if name in vars(cls) else inherited(cls, name, handler)
        protected = _ByMixin(operation, view)
        setattr(cls, name, protected)
        protected.__set_name__(cls, name)
    if "idempotent_operations" in vars(cls) and isinstance(declaration, str):
        registry.bind(operation.name, [f"{base.__module__}.{base.__qualname__}.{name}" for base in cls.__mro__])


class Docstring(str):
    """The docstring of a function under ``@idempotent``. It guards the class that it is put into.

    ``@api_view`` makes a class that calls the function. The only part of the function that it puts into the class body
    is the docstring. Python calls ``__set_name__`` of each value in a class body with the class, and that class must be
    guarded.
    """

    __slots__ = ()

    def __set_name__(self, owner: type, name: str) -> None:
        guard(owner)


def function_of(view_class: Any) -> Any:
    """The function of which ``@api_view``, that of DRF or of adrf, made the class; or None."""
    for name in view_class.http_method_names if issubclass(view_class, APIView) else ():
        handler = vars(view_class).get(name)
        if getattr(handler, "__qualname__", "").startswith("api_view.<locals>."):
            return next(filter(callable, held_by(handler)), None)
    return None


def handlers_of_view(view_class: Any, actions: Mapping[str, str] | None) -> list[RoutedHandler]:
    """The handlers of a class: the actions of a ViewSet, the function below ``@api_view``, or the class's methods.

    :param actions: the actions of a ViewSet by method in lower case, or None.
    """
    if actions is not None:
        return [
            RoutedHandler(
                getattr(view_class, name),
                frozenset(method.upper() for method, action in actions.items() if action == name),
                name,
            )
            for name in sorted(set(actions.values()))
        ]
    function = function_of(view_class)
    if function is not None:
        return [RoutedHandler(function, frozenset(methods_of_class(view_class)))]
    return handlers_of_class(view_class)
