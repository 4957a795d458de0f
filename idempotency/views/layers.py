"""Judges the decorators around a protection.

A replay doesn't run those below, so any decorator below that may check something is refused. Django's harmless
decorators are recognised by the code of their wrappers, because ``functools.wraps()`` changes a wrapper's name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncContextDecorator, ContextDecorator
from itertools import takewhile
from types import CodeType, FunctionType, MethodType
from typing import Any, Final, TypeVar, cast

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django.db.transaction import Atomic, atomic
from django.utils.decorators import method_decorator
from django.views.decorators.cache import cache_control, never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.debug import sensitive_post_parameters, sensitive_variables
from django.views.decorators.http import condition
from django.views.decorators.vary import vary_on_headers

from .. import foreign
from ..http.adapter import adapters
from ..http.protection import Protection, protection_of
from ..http.stack import (
    CARRIERS,
    attribute,
    attributes,
    callables_among,
    decorated_by,
    decorator_stack,
    held_by,
    wrapped_by,
)
from ..operation import Operation

_Decorator = TypeVar("_Decorator", bound=Callable[..., Any])

#: The attribute of a wrapper that a ``checks_nothing`` decorator made. It holds the wrapper, because
#: ``functools.wraps()`` copies it to other wrappers, and the decorated view. wrapt's proxies keep attributes with this
#: prefix themselves.
_MARK: Final = "_self_idempotency_checks_nothing"


def checks_nothing(decorator: _Decorator) -> _Decorator:
    """Allow a decorator below a protection, where a replay doesn't run it.

    Use the decorator that it returns, which marks its wrappers::

        timed = checks_nothing(library.timed)
        traced = checks_nothing(library.traced("any name"))

    A decorator that checks the caller or the request, or that takes a lock, belongs above the protection instead.

    :returns: the decorator. Calling it raises ``TypeError`` if the argument is not a view, or if the result can't be
        marked.
    """

    @functools.wraps(decorator)
    def marking(view: Any) -> Any:
        if callable(view):
            decorated = decorator(view)
            if decorated is view:
                return view
            if callable(decorated):
                try:
                    setattr(decorated, _MARK, (decorated, view))
                except AttributeError as error:
                    raise TypeError(f"checks_nothing() can't mark {decorated!r}, which takes no attributes.") from error
                return decorated
        raise TypeError(
            f"checks_nothing() needs a decorator that takes and returns a view, not {_name_of(decorator)}. If that "
            f"returns the decorator, call it first: checks_nothing(decorator(…))."
        )

    return cast("_Decorator", marking)


def refuse_layers(operation: Operation, handler: Any, *, is_method: bool = False) -> None:
    """:param is_method: the handler is a method of a class.
    :raises ImproperlyConfigured: a decorator of the handler may check something, or opens a durable transaction.
    """
    passed: list[Any] = []
    layer = handler
    while layer is not None and not any(layer is known for known in passed):
        passed.append(layer)
        layer = _judged(operation, layer, is_method)


def _judged(operation: Operation, layer: Any, is_method: bool) -> Any:
    """What a harmless layer decorates, or None if it is the function that handles the request."""
    if issubclass(type(layer), Protection):
        return layer.view
    if calls_next(layer):  # the other definitions are judged as well
        return None
    blocks = [held for held in held_by(layer) if issubclass(type(held), Atomic)]
    if operation.declared["transaction"] and any(map(foreign.is_durable, blocks)):
        raise ImproperlyConfigured(
            f"{operation} is declared above atomic(durable=True), which Django refuses within the operation's own "
            f"transaction. Leave durable=True out, or declare the operation with transaction=False."
        )
    marked, view = attribute(layer, _MARK) or (None, None)
    if marked is layer:
        return view
    inner = decorated_by(layer, is_method=is_method)
    if inner is None or _is_harmless(operation, layer, inner):
        return inner
    made = "" if wrapped_by(layer) is not None else " If it makes the handler, call the handler in a method instead."
    raise ImproperlyConfigured(
        f"{operation} is declared above {_name_of(layer)}, which a replay would not run. If it checks the caller or "
        f"the request, or takes a lock, put @idempotent({operation.name!r}) below it, closest to the function. If it "
        f"does nothing of the kind, put idempotency.checks_nothing() around the decorator.{made}"
    )


def _is_harmless(operation: Operation, layer: Any, inner: Any) -> bool:
    """:raises ImproperlyConfigured: the layer is a ``method_decorator()`` of a decorator that may check something."""
    held, wrapped = held_by(layer), wrapped_by(layer)
    if type(layer) in CARRIERS:
        # A partial's arguments may be the view, as in partial(check, view), and a method's object may hold it.
        owner = attributes(layer.__self__) if type(layer) is MethodType else {}
        others = [*(value for value in held if value is not inner), *owner.values()]
        is_copy = wrapped is not None and not any(wrapped is each for each in decorator_stack(inner))
        return not is_copy and not any(callables_among(others))
    if type(layer) is not FunctionType or not any(value is inner for value in held):
        return False
    others = [value for value in held if value is not inner]
    if layer.__code__ is _METHOD_DECORATOR:
        for decorator in others:
            _refuse_decorator(operation, decorator, is_async=iscoroutinefunction(inner))
        return True
    if layer.__code__ in _CONTEXT_DECORATOR:
        return all(type(value) is Atomic for value in others)
    # A precondition depends on what the operation changes, so a replay must not check it.
    known = (_HARMLESS, _PRECONDITION, *(adapter.harmless for adapter in adapters))
    return any(layer.__code__ in codes for codes in known)


def _refuse_decorator(operation: Operation, decorator: Any, *, is_async: bool) -> None:
    """Judge what a decorator makes, because ``method_decorator()`` applies it at each call."""

    def view(*args: Any, **kwargs: Any) -> Any: ...

    async def async_view(*args: Any, **kwargs: Any) -> Any: ...

    refuse_layers(operation, decorator(async_view if is_async else view))


def refuse_skipped(operation: Operation, view_class: type, name: str) -> None:
    """Judge each definition of a handler, because one that calls ``super()`` reaches the next.

    :raises ImproperlyConfigured: a replay would skip a decorator of a definition, or it is not a method.
    """
    is_below = False
    for base in view_class.__mro__:
        if name in vars(base):
            definition = vars(base)[name]
            if isinstance(definition, (staticmethod, classmethod)):
                raise ImproperlyConfigured(
                    f"{operation} is declared for {base.__name__}.{name}, which is a {type(definition).__name__}. "
                    f"Make it a method."
                )
            protection = None if is_below else protection_of(definition)
            refuse_layers(operation, definition if protection is None else protection.view, is_method=True)
            is_below = True


def inherited(cls: type | None, name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls the next handler after ``cls`` in the MRO, or the class's handler if ``cls`` is None."""

    def find(self: Any) -> Any:
        return MethodType(getattr(type(self), name), self) if cls is None else getattr(super(cls, self), name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return find(self)(*args, **kwargs)

    async def await_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await find(self)(*args, **kwargs)

    return functools.wraps(handler)(await_call if iscoroutinefunction(handler) else call)


def calls_next(view: Any) -> bool:
    """Whether ``inherited`` made the view."""
    return type(view) is FunctionType and view.__code__ in inherited.__code__.co_consts


def is_within_atomic(outermost: Iterable[Any]) -> bool:
    """Whether ``atomic()`` is among the decorators above the protection, where no claim can be committed.

    :param outermost: the result of ``around``.
    """
    return any(part is atomic or issubclass(type(part), Atomic) for part in _parts_above(outermost))


def is_within_precondition(outermost: Iterable[Any]) -> bool:
    """Whether ``condition``, ``etag`` or ``last_modified`` is among the decorators above the protection.

    There they refuse the retry of an executed request, because the operation changes the value that ``If-Match`` is
    compared with.
    """
    parts = (part for part in _parts_above(outermost) if type(part) is FunctionType)
    return any(part.__code__ in _PRECONDITION for part in parts)


def _parts_above(outermost: Iterable[Any]) -> Iterator[Any]:
    """The decorators above the protection, and the values that they hold."""
    for outer in outermost:
        for layer in takewhile(lambda layer: not issubclass(type(layer), Protection), decorator_stack(outer)):
            yield layer
            yield from held_by(layer)


def codes_within(function: Any) -> Iterator[CodeType]:
    """The code of the functions that a function creates."""
    waiting = [function.__code__]
    while waiting:
        found = [constant for constant in waiting.pop().co_consts if isinstance(constant, CodeType)]
        yield from found
        waiting += found


_METHOD_DECORATOR: Final = method_decorator(csrf_exempt)(lambda request: None).__code__
_CONTEXT_DECORATOR: Final = frozenset(
    [*codes_within(ContextDecorator.__call__), *codes_within(AsyncContextDecorator.__call__)]
)
_PRECONDITION: Final = frozenset(codes_within(condition))
_HARMLESS: Final = frozenset(
    code
    for decorator in (
        cache_control,
        csrf_exempt,
        never_cache,
        sensitive_post_parameters,
        sensitive_variables,
        vary_on_headers,  # also makes vary_on_cookie
    )
    for code in codes_within(decorator)
)


def _name_of(layer: Any) -> str:
    if type(layer) is FunctionType:
        if layer.__code__ in _CONTEXT_DECORATOR:
            return _name_of(next(held for held in held_by(layer) if held is not wrapped_by(layer)))
        code, module = layer.__code__, layer.__globals__.get("__name__")
        return f"{module or code.co_filename}.{code.co_qualname.partition('.<locals>')[0]}"
    return f"{type(layer).__module__}.{type(layer).__qualname__}"
