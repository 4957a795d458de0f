"""``IdempotentMixin``: protects the handlers of a class, by name or all of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from django.core.exceptions import ImproperlyConfigured
from django.views import View

from ..http.adapter import handlers_of, unsafe_handlers_of_class
from ..http.protection import SAFE_METHODS, protection_of
from ..operation import Operation, operation_for, registry
from .decorators import Protected, dotted, guard
from .layers import inherited, refuse_skipped


class _Every:
    def __repr__(self) -> str:
        return "EVERY"


#: For ``idempotent_operations``: every handler of an unsafe method.
EVERY: Final = _Every()


# Not a docstring, because API schemas and DRF's pages would show it as the description of views without one.
#
# The mixin protects handlers of a class-based view, an APIView or a ViewSet. ``idempotent_operations`` maps the actions
# of a ViewSet, or the methods of another class in lower case, to names or ``Operation`` objects.
#
# ``EVERY`` instead of the mapping is for a project's base class. In the class and its subclasses it protects each
# handler of an unsafe method that has no operation, for requests with a key. The operation's name is the dotted path of
# the class and the handler.
#
# The handlers are protected when the class is made, so neither the mixin's position among the bases nor an override of
# ``initial()`` or ``dispatch()`` matters. An override of a handler in a subclass is also protected.
class IdempotentMixin:
    idempotent_operations: ClassVar[Mapping[str, str | Operation] | _Every] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        declared = cls.idempotent_operations
        if isinstance(declared, Mapping):
            by_every = {name for base in cls.__mro__ for name, value in vars(base).items() if type(value) is _ByEvery}
            for name in by_every - set(declared):
                if isinstance(handler := getattr(cls, name), _ByEvery):
                    setattr(cls, name, handler.view)
            for name, declaration in declared.items():
                _protect(cls, name, declaration)
        elif declared is EVERY:
            for name in unsafe_handlers_of_class(cls):
                _protect_as_named(cls, name)
        else:
            raise ImproperlyConfigured(
                f"{cls.__name__}.idempotent_operations must map handler names to operations or be EVERY: {declared!r}"
            )
        guard(cls, _complete)


class _ByMixin(Protected):
    """A handler that the mixin protects. A subclass may assign it to another operation."""


class _ByEvery(_ByMixin):
    """A handler that ``EVERY`` protects."""


def operation_named_after(view_class: type, name: str) -> Operation:
    """The operation that ``EVERY`` and routers declare for a handler."""
    path = f"{dotted(view_class)}.{name}"
    registry.bind(path, [path])
    return registry.get(path) or Operation.declare(path, key_required=False)


def refuse_shared_name(view_class: type) -> None:
    """:raises ImproperlyConfigured: the dotted path of the class does not lead to it."""
    found: Any = sys.modules.get(view_class.__module__)
    for part in view_class.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not view_class:
        raise ImproperlyConfigured(
            f"The operations of {dotted(view_class)} are named after its dotted path, which does not lead to it, so "
            f"another class may have the same names. Define the class in its module, or name its operations: "
            f'idempotent_operations = {{"post": "orders.create"}}.'
        )


def _protect(cls: type[IdempotentMixin], name: str, declaration: str | Operation) -> None:
    """:raises ImproperlyConfigured: the handler can't be protected, or its decorator names another operation."""
    operation = operation_for(declaration, {})
    handler = getattr(cls, name, None)
    if handler is None and issubclass(cls, View):
        raise ImproperlyConfigured(
            f"{cls.__name__}.idempotent_operations names {name!r}, but {cls.__name__} has no such handler."
        )
    declared = protection_of(handler)
    if handler is not None and (declared is None or declared.operation.name != operation.name):
        if declared is not None and not isinstance(handler, _ByMixin):
            raise ImproperlyConfigured(
                f"{cls.__name__}.idempotent_operations gives {name!r} to operation {operation.name!r}, but @idempotent "
                f"on the method gives it to {declared.operation.name!r}. Remove one of the two."
            )
        _put(cls, name, handler, _ByMixin, operation)
    else:
        refuse_skipped(operation, cls, name)
    if "idempotent_operations" in vars(cls) and isinstance(declaration, str):
        registry.bind(operation.name, [f"{base.__module__}.{base.__qualname__}.{name}" for base in cls.__mro__])


def _protect_as_named(cls: type, name: str) -> None:
    """Protect a handler, unless it has an operation."""
    handler = getattr(cls, name)
    declared = protection_of(handler)
    if declared is None or isinstance(handler, _ByEvery):
        _put(cls, name, handler, _ByEvery, operation_named_after(cls, name))
    else:
        refuse_skipped(declared.operation, cls, name)


def _put(cls: type, name: str, handler: Any, kind: type[_ByMixin], operation: Operation) -> None:
    refuse_skipped(operation, cls, name)
    if isinstance(handler, _ByMixin):
        view = handler.view
    elif name in vars(cls):
        view = handler
    else:
        view = inherited(cls, name, handler)
    protected = kind(operation, view)
    protected.register()
    setattr(cls, name, protected)
    protected.__set_name__(cls, name)


def _complete(view_class: Any, view: Any) -> None:
    """Protect the handlers that ``EVERY`` can't find before the class is routed, such as the actions of a ViewSet."""
    if view_class.idempotent_operations is EVERY:
        refuse_shared_name(view_class)
        for routed in handlers_of(view):
            if routed.name and not SAFE_METHODS.issuperset(routed.methods) and routed.operation is None:
                _protect_as_named(view_class, routed.name)
