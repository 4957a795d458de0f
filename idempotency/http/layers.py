"""Refuses decorators below a protection that may check something, because a replay doesn't run them.

A harmless decorator is recognised by the code of its wrapper, because ``functools.wraps()`` changes the wrapper's name,
and by the objects that the wrapper holds besides the view, because decorators may share its code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from types import CodeType, FunctionType, MethodType
from typing import Any, Final, TypeVar

from asgiref.sync import AsyncToSync, SyncToAsync
from django.core.exceptions import ImproperlyConfigured
from django.db.transaction import Atomic, atomic
from django.utils.decorators import method_decorator
from django.views.decorators.cache import cache_control, never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.debug import sensitive_post_parameters, sensitive_variables
from django.views.decorators.vary import vary_on_cookie, vary_on_headers

from ..operation import Operation
from .protection import PRECONDITION, Protection, decorator_stack, held_by

_Decorator = TypeVar("_Decorator", bound=Callable[..., Any])

#: Objects that only call a function.
_TRANSPARENT: Final = (Protection, functools.partial, MethodType, SyncToAsync, AsyncToSync)

#: Identifies a decorator: the code of its wrapper, and the types and code that the wrapper holds besides the view.
_Kind = tuple[CodeType, frozenset[Any]]


def _new_view(*, is_async: bool = False) -> Any:
    """A new view to decorate. Decorators may change its attributes, so it is not shared."""

    def view(*args: Any, **kwargs: Any) -> Any: ...

    async def async_view(*args: Any, **kwargs: Any) -> Any: ...

    return async_view if is_async else view


_METHOD_DECORATOR: Final = method_decorator(csrf_exempt)(_new_view()).__code__
_harmless: set[_Kind] = set()


def checks_nothing(decorator: _Decorator) -> _Decorator:
    """Allow a decorator below a protection, where a replay doesn't run it.

    Use it on the decorator's function, or call it with a decorator of another package, before the views are declared::

        checks_nothing(traced("any name"))

    The declaration covers all arguments of the decorator, which is called once or twice with a dummy view.

    :returns: the decorator.
    :raises TypeError: the decorator does not return a function that calls the view.
    """
    kinds = _kinds_of(decorator, _new_view())
    if not kinds:
        raise TypeError(f"checks_nothing() needs a decorator that makes a function around the view, not {decorator!r}.")
    with suppress(Exception):  # a decorator for synchronous views only may raise anything
        kinds |= _kinds_of(decorator, _new_view(is_async=True))
    _harmless.update(kinds)
    return decorator


def _kinds_of(decorator: Callable[..., Any], view: Any) -> set[_Kind]:
    layers = _layers(decorator(view), view.__name__)
    return {_kind_of(layer, inner) for layer, inner in layers if isinstance(layer, FunctionType)}


def refuse_layers(operation: Operation, handler: Any, name: str = "") -> None:
    """:param name: the attribute of the class by which the protection finds the handler, if any.
    :raises ImproperlyConfigured: a decorator of the handler may check something, or opens a durable transaction.
    """
    for layer, inner in _layers(handler, name):
        if operation.declared["transaction"] and any(
            isinstance(held, Atomic) and vars(held)["durable"] for held in _parts(held_by(layer))
        ):
            raise ImproperlyConfigured(
                f"{operation} is declared above atomic(durable=True), which Django refuses within the operation's own "
                f"transaction. Leave durable=True out, or declare the operation with transaction=False."
            )
        if isinstance(layer, FunctionType) and layer.__code__ is _METHOD_DECORATOR:
            decorators = next(held for held in held_by(layer) if held is not inner)
            for decorator in decorators if isinstance(decorators, Collection) else [decorators]:
                refuse_layers(operation, decorator(_new_view()), "view")
        elif not isinstance(layer, FunctionType) or not (
            # A precondition depends on what the operation changes, so a replay must not check it.
            layer.__code__ in PRECONDITION or _kind_of(layer, inner) in _harmless
        ):
            raise ImproperlyConfigured(
                f"{operation} is declared above {_name_of(layer)}, which a replay would not run. If it checks the "
                f"caller or the request, put @idempotent({operation.name!r}) below it, closest to the function. If it "
                f"checks nothing, declare that with idempotency.checks_nothing()."
            )


def _layers(handler: Any, name: str = "") -> Iterator[tuple[Any, Any]]:
    """The decorators of a handler, outermost first, each with the object that it decorates."""
    layer = handler
    while (inner := _decorated_by(layer, name)) is not None:
        if not isinstance(layer, _TRANSPARENT):
            yield layer, inner
        layer = inner


def _decorated_by(layer: Any, name: str) -> Any:
    inner = next(islice(decorator_stack(layer), 1, None), None)
    if inner is not None or not name or getattr(getattr(layer, "__code__", None), "co_name", "") == name:
        return inner
    # The code's name differs from the attribute's, so a decorator without functools.wraps() may have made it.
    return next((held for held in held_by(layer) if isinstance(held, (FunctionType, Protection))), None)


def _kind_of(layer: FunctionType, inner: Any) -> _Kind:
    held = (value for value in held_by(layer) if value is not inner)
    parts = (part.__code__ if isinstance(part, FunctionType) else part for part in _parts(held))
    return layer.__code__, frozenset(part if isinstance(part, (type, CodeType)) else type(part) for part in parts)


def _parts(values: Iterator[Any]) -> Iterator[Any]:
    """The values that can have an effect, including values in lists and dicts."""
    for value in values:
        if isinstance(value, Mapping):
            yield from _parts(iter(value.values()))
        elif isinstance(value, (list, tuple, set, frozenset)):
            yield from _parts(iter(value))
        elif value is not None and not isinstance(value, (str, bytes, int, float)):
            yield value


def _name_of(layer: Any) -> str:
    if isinstance(layer, FunctionType):
        return f"{layer.__globals__.get('__name__')}.{layer.__code__.co_qualname.partition('.<locals>')[0]}"
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


for _each in (
    atomic,
    cache_control(),
    csrf_exempt,
    never_cache,
    sensitive_post_parameters(),
    sensitive_variables(),
    vary_on_cookie,
    vary_on_headers(),
):
    checks_nothing(_each)
