"""The decorators around a view: which of them run before a replay, and which only with the handler.

A decorator leaves no name behind. What it leaves is a function whose code is in the decorator's module. So the module
tells what a decorator is for, and Django's own modules are known.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from django.db.transaction import Atomic, atomic

from ..operation import Operation
from .decorators import Protected

#: The modules of Django's decorators that check a login or a permission.
PERMISSIONS = ("django.contrib.auth.decorators", "django.contrib.admin.views.decorators")

#: The modules of decorators that are as good below @idempotent, because a replay needs none of what they do.
HARMLESS = ("contextlib", "django.db.transaction", "django.utils.", "django.views.decorators.", "idempotency.")


@dataclass(frozen=True)
class Stack:
    """The decorators of a protected view, from the outermost to the innermost, parted by its protection."""

    above: tuple[Any, ...]
    below: tuple[Any, ...]
    #: The undecorated view.
    view: Any
    #: The operation of ``@idempotent`` among the decorators, if there is one.
    operation: Operation | None = None

    @classmethod
    def of(cls, callback: Any) -> Stack:
        """The decorators of a function, or around ``as_view()``."""
        layers = tuple(layers_of(callback))
        for place, layer in enumerate(layers):
            if (operation := _operation_of(layer)) is not None:
                return cls(layers[:place], layers[place + 1 : -1], layers[-1], operation)
        return cls(layers[:-1], (), layers[-1])

    @classmethod
    def of_handler(cls, view_class: Any, name: str, callback: Any) -> Stack:
        """The decorators of a method, of the class's ``dispatch()``, and around its ``as_view()``."""
        outer = (*layers_of(callback), *layers_of(view_class.dispatch))
        handler = cls.of(getattr(view_class, name))
        if handler.operation is None:  # IdempotentMixin protects the method as it is, decorated
            return cls(outer, handler.above, handler.view)
        return replace(handler, above=(*outer, *handler.above))

    def mistakes(self) -> list[str]:
        """Sentences on decorators with which the protection does not hold."""
        found = [
            f"{_name_of(layer)} is below the protection, so a replay is not checked. Put it above @idempotent, or on "
            f"dispatch()."
            for layer in self.below
            if _module_of(layer).startswith(PERMISSIONS)
        ]
        if any(map(_is_atomic, self.above)):
            found.append(
                "transaction.atomic is above the protection, where no claim can be committed: every request is "
                "refused. Remove it, because the handler runs in a transaction anyway."
            )
        return found

    def doubts(self) -> list[str]:
        """Sentences on decorators that are below the protection and unknown here."""
        return [
            f"{_name_of(layer)} is below the protection, so it does not run before a replay. If it checks a "
            f"permission, put it above @idempotent."
            for layer in self.below
            if not _module_of(layer).startswith((*PERMISSIONS, *HARMLESS))
        ]


def declared_methods(callback: Any) -> Collection[str]:
    """The methods that Django's ``require_http_methods()`` and its relatives let through; empty if there is none."""
    allowed = [
        {str(method) for method in closure_of(layer)["request_method_list"]}
        for layer in layers_of(callback)
        if "request_method_list" in closure_of(layer)
    ]
    return set.intersection(*allowed) if allowed else set()


def layers_of(view: Any, outer: tuple[Any, ...] = ()) -> Iterator[Any]:
    """The decorators from the outermost to the innermost, and the view itself.

    :param outer: what is around ``view``.
    """
    if isinstance(view, functools.partial):
        yield from layers_of(view.func, outer)
        return
    decorators = closure_of(view).get("decorators")
    if decorators is not None and _module_of(view) == "django.utils.decorators":  # method_decorator()
        # Several are kept in the order in which they are applied: the innermost first.
        yield from reversed(decorators) if isinstance(decorators, (list, tuple)) else [decorators]
    else:
        yield view
    inner = getattr(view, "__wrapped__", None)
    yield from _hidden_layers(view, (*outer, view)) if inner is None else layers_of(inner, outer)


def _hidden_layers(view: Any, outer: tuple[Any, ...]) -> Iterator[Any]:
    """The layers within a decorator without ``functools.wraps()``, if they can be told.

    Such a decorator holds the view in a variable or, if it is an object, in an attribute.
    """
    attributes = {} if inspect.isroutine(view) else getattr(view, "__dict__", {})
    held = [
        value
        for value in (*closure_of(view).values(), *attributes.values())
        if callable(value) and not isinstance(value, type) and all(value is not one for one in outer)
    ]
    found = [layers for value in held if any(map(_is_view, layers := [*layers_of(value, outer)]))]
    if len(found) == 1:
        yield from found[0]


def _is_view(layer: Any) -> bool:
    return isinstance(layer, Protected) or class_of(layer) is not None


def class_of(callback: Any) -> Any:
    """The class of a view that ``as_view()`` or ``@api_view`` made, or None."""
    return getattr(callback, "cls", getattr(callback, "view_class", None))


def _operation_of(layer: Any) -> Operation | None:
    """The operation of ``@idempotent``, or of what it returned."""
    declared = layer.operation if isinstance(layer, Protected) else closure_of(layer).get("declared")
    return declared if isinstance(declared, Operation) else None


def _is_atomic(layer: Any) -> bool:
    return layer is atomic or isinstance(layer, Atomic) or isinstance(closure_of(layer).get("self"), Atomic)


def closure_of(function: Any) -> dict[str, Any]:
    """The variables that ``function`` uses of the function around it, those that are assigned."""
    cells = getattr(function, "__closure__", None) or ()
    code = getattr(function, "__code__", None)
    names = () if code is None else code.co_freevars
    values = {}
    for name, cell in zip(names, cells, strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    return values


def _module_of(layer: Any) -> str:
    """The module of a decorator's code. ``__module__`` is that of the view, because functools.wraps() copies it."""
    names = getattr(layer, "__globals__", None)
    return str(type(layer).__module__ if names is None else names.get("__name__", ""))


def _name_of(layer: Any) -> str:
    code = getattr(layer, "__code__", None)
    qualified = getattr(code, "co_qualname", getattr(code, "co_name", ""))  # Python 3.10 has no qualified name
    return ".".join(filter(None, (_module_of(layer), qualified.partition(".<locals>")[0])))
