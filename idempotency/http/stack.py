"""Reads stacks of decorators.

Two questions need two walks. ``decorator_stack`` proves that each layer can call the next one, so that a handler counts
as protected. ``decorated_by`` only needs a hint that a layer decorates something, because a replay would skip it.

Neither evaluates a lazy object that a decorator holds: ``isinstance()`` and ``getattr()`` would.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FunctionType, MemberDescriptorType, MethodType
from typing import Any, Final

from asgiref.sync import AsyncToSync, SyncToAsync

from .. import foreign

#: The types of objects that only call a function, each with the attribute that holds it.
CARRIERS: Final[dict[type, str]] = {
    functools.partial: "func",
    functools.partialmethod: "func",
    MethodType: "__func__",
    SyncToAsync: foreign.SYNC_FUNCTION,
    AsyncToSync: foreign.ASYNC_FUNCTION,
}
_CONTAINERS: Final = (list, tuple, set, frozenset, dict)


def decorator_stack(handler: object) -> Iterator[Any]:
    """A handler, the function that it decorates, and so on inwards, as long as each can call the next one."""
    passed: list[Any] = []
    layer: Any = handler
    while layer is not None and not _is_among(passed, layer):
        yield layer
        passed.append(layer)
        inner = wrapped_by(layer)
        if type(layer) in CARRIERS:
            layer = _carried_by(layer)
        else:
            layer = inner if inner is not None and _can_call(layer, inner) else None


def decorated_by(layer: Any, *, is_method: bool = False) -> Any:
    """What a layer may decorate, or None.

    :param is_method: the layer is a method of a class. A function that another one made around a callable is then
        taken for a decorator without ``functools.wraps()``. Otherwise it may be a view that a factory made.
    """
    if type(layer) in CARRIERS:
        return _carried_by(layer)
    inner = wrapped_by(layer)
    if inner is None and (type(layer) is not FunctionType or (is_method and _is_made_by_function(layer))):
        return next(callables_among(held_by(layer)), None)
    return inner


def class_of(callback: object) -> Any:
    """The class of a view that ``as_view()`` made, even below decorators; or None."""
    for layer in decorator_stack(callback):
        if type(layer) is FunctionType:
            named = getattr(layer, foreign.VIEW_CLASS, getattr(layer, "view_class", None))
            if named is not None and _is_among(held_by(layer), named):
                return named
    return None


def instance_within(callback: object, kind: Any) -> Any:
    """The first instance of a class, or of one in a tuple, that a decorator in the callback's stack holds; or None."""
    held = (value for layer in decorator_stack(callback) for value in held_by(layer))
    return next((value for value in held if issubclass(type(value), kind)), None)


def wrapped_by(layer: Any) -> Any:
    """The object in ``__wrapped__``, which ``functools.wraps()`` sets even if the layer never calls it."""
    return attribute(layer, "__wrapped__")


def attribute(layer: Any, name: str) -> Any:
    """An attribute without ``__getattr__()``, or None."""
    with suppress(AttributeError, TypeError):  # TypeError if the layer is a class
        return object.__getattribute__(layer, name)
    return None


def _carried_by(layer: Any) -> Any:
    return getattr(layer, CARRIERS[type(layer)])


def held_by(layer: Any) -> list[Any]:
    """The values that a layer can call, including those in lists and dicts. A function's globals count only if it was
    made from text, as by boltons, because they were made for it.
    """
    values: Iterable[Any]
    if type(layer) is FunctionType:
        values = [*_enclosed(layer), *(layer.__defaults__ or ()), (layer.__kwdefaults__ or {})]
    elif type(layer) in (functools.partial, functools.partialmethod):
        values = [layer.func, layer.args, layer.keywords]
    elif type(layer) is MethodType:
        values = [layer.__func__]
    else:
        # functools.update_wrapper() sets __wrapped__ even if the object never calls it.
        values = [value for name, value in attributes(layer).items() if name != "__wrapped__"]
    return _without_containers(values)


def attributes(layer: Any) -> dict[str, Any]:
    """The attributes of an instance, also those in slots."""
    found = dict(attribute(layer, "__dict__") or {})
    for base in type(layer).__mro__:
        for name, member in vars(base).items():
            if type(member) is MemberDescriptorType:
                with suppress(AttributeError):  # not assigned
                    found[name] = member.__get__(layer)
    return found


def callables_among(values: Iterable[Any]) -> Iterator[Any]:
    """The values that may be views. Classes, such as a view's form, are none."""
    return (value for value in values if callable(value) and not issubclass(type(value), type))


def _is_made_by_function(function: FunctionType) -> bool:
    return function.__code__.co_qualname.rpartition(".")[0].endswith("<locals>") or _is_made_from_text(function)


def _is_made_from_text(function: FunctionType) -> bool:
    module = sys.modules.get(function.__globals__.get("__name__", ""))
    has_file = not function.__code__.co_filename.startswith("<")
    return not has_file and (module is None or vars(module) is not function.__globals__)


def _enclosed(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not assigned yet
            yield cell.cell_contents
    if _is_made_from_text(function):
        yield from (function.__globals__.get(name) for name in function.__code__.co_names)


def _can_call(layer: Any, inner: object) -> bool:
    """Whether a layer holds the function that it decorates, directly or in a function that it holds."""
    if any("__class__" in vars(base) for base in type(layer).__mro__[:-1]):
        return True  # a proxy, such as wrapt's
    waiting: list[Any] = [layer]
    seen: list[Any] = []
    while waiting:
        for value in held_by(waiting.pop()):
            if value is inner:
                return True
            if type(value) in (FunctionType, *CARRIERS) and not _is_among(seen, value):
                seen.append(value)
                waiting.append(value)
    return False


def _without_containers(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    waiting = deque(values)
    seen: list[Any] = []
    while waiting:
        value = waiting.popleft()
        if type(value) not in _CONTAINERS:
            found.append(value)
        elif not _is_among(seen, value):
            seen.append(value)
            waiting.extend(list(value.values() if type(value) is dict else value))
    return found


def _is_among(values: Iterable[Any], wanted: object) -> bool:
    """Whether a value is the wanted object. Comparing it could run code of the project."""
    return any(value is wanted for value in values)
