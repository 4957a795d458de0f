"""``@idempotent``: a view, or a method of a class-based view, as a protected operation."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from types import MethodType
from typing import TYPE_CHECKING, Any
from uuid import UUID

from asgiref.sync import async_to_sync, iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db.models import Model
from django.http import HttpRequest

from ..operation import Operation, operation_for
from ..options import OperationPolicy
from ..protocol.claims import alias
from ..protocol.execution import as_atomic_request
from .adapters import adapter_type_for
from .exchange import exchange_for, is_running

if TYPE_CHECKING:  # Python 3.10 has no Unpack, and only a type checker reads it
    from typing_extensions import Unpack


def idempotent(operation: str | Operation, **policy: Unpack[OperationPolicy]) -> Callable[[Callable[..., Any]], Any]:
    """Make a view take effect once for each account and ``Idempotency-Key``.

    Goes on a function view, an async view, a method of a class-based view, a function under ``@api_view``, and a
    method or ``@action`` of a DRF view. Put it closest to the function: what stands above it (``login_required``,
    ``api_view``, permissions) runs before a replay, every time.

    :param operation: the operation's name, or an ``Operation`` declared elsewhere.
    :param policy: the keyword arguments of ``Operation``, when a name is given.
    :raises ImproperlyConfigured: the policy is incomplete or contradictory, or what is decorated could not be
        protected from here.
    """
    declared = operation_for(operation, policy)

    def decorate(view: Callable[..., Any]) -> Protected:
        return Protected(declared, view)

    return decorate


class RecordAlias(set[str]):
    """The databases whose ATOMIC_REQUESTS a protected view is exempt from: the record's, whichever the router names.

    The claim must commit before the handler runs, so no request-wide transaction may be open on that database. Others
    keep theirs.
    """

    def __contains__(self, using: object) -> bool:
        return super().__contains__(using) or using == alias()


class Protected:
    """A view under an operation: callable like the view, and bindable like a method."""

    _non_atomic_requests: set[str]

    def __init__(self, operation: Operation, view: Callable[..., Any]) -> None:
        _refuse_unprotectable(operation, view)
        functools.update_wrapper(self, view)
        docstring = _Docstring(view.__doc__ or "")
        docstring.operation = operation
        self.__doc__ = docstring
        self.operation = operation
        self.view = view
        self._non_atomic_requests = RecordAlias(getattr(view, "_non_atomic_requests", ()))
        self._is_async = iscoroutinefunction(view)
        if self._is_async:
            markcoroutinefunction(self)

    def __set_name__(self, owner: type, name: str) -> None:
        if name == "dispatch" and hasattr(owner, "handle_exception"):
            raise ImproperlyConfigured(
                f"@idempotent on {owner.__name__}.dispatch would run before authentication. Decorate the handler "
                f"method, or use IdempotentMixin."
            )
        exempt_from_atomic_requests(owner)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request = _request_among(args)
        if request is None:
            raise TypeError(
                f"@idempotent({self.operation.name!r}) expects a request as the first argument of "
                f"{getattr(self.view, '__qualname__', self.view)!r}."
            )
        call = functools.partial(self.view, *args, **kwargs)
        if is_running(self.operation, request):  # decorated under the mixin too, or reached by super().create()
            return call()
        if request.method not in self.operation.methods:
            return call() if self._is_async else as_atomic_request(call, set(self._non_atomic_requests))
        route = _route(request, kwargs)
        if self._is_async:
            return _shielded(exchange_for(self.operation, request, async_to_sync(call), route).respond)
        return exchange_for(self.operation, request, call, route).respond()


async def _shielded(respond: Callable[[], Any]) -> Any:
    """Run the exchange in the request's thread, to its end even if the client has gone.

    Transactions belong to a thread's connection, so claim, handler and completion share one: the handler's coroutine
    goes back to this event loop, and what it hands to ``sync_to_async`` comes back to that thread, inside the
    transaction. A cancelled request (the client disconnected) is let finish and be recorded, since its retry is
    already on the way; only then is the cancellation passed on.
    """
    running = asyncio.ensure_future(sync_to_async(respond)())
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        running.exception()  # the exchange answered to nobody; an error of its own is not "never retrieved"
        raise cancelled
    return running.result()


class _Docstring(str):  # noqa: SLOT000 - one instance a view, and it carries an attribute
    """A docstring that tells of the class it is put into.

    ``@api_view`` makes a class that calls the function and shows nothing of it, except that the function's docstring
    becomes the class's. A value in a class body is told of its owner (``object.__set_name__``), and the owner is what
    must be exempt from ATOMIC_REQUESTS.
    """

    operation: Operation

    def __set_name__(self, owner: type, name: str) -> None:
        owner.idempotent_operation = lambda handler: self.operation  # type: ignore[attr-defined]
        exempt_from_atomic_requests(owner)


def exempt_from_atomic_requests(view_class: type) -> None:
    """Let the views made of a class commit their claims. What they don't protect stays one transaction a request.

    ``as_view`` is where a class becomes the callable that Django looks at, so that is what is wrapped: once a class,
    and inherited by its subclasses.
    """
    if not hasattr(view_class, "as_view") or getattr(view_class.as_view, "_exempts", False):
        return
    own = view_class.__dict__.get("as_view")

    def as_view(cls: Any, *args: Any, **initkwargs: Any) -> Any:
        inherited: Any = super(view_class, cls)
        make = inherited.as_view if own is None else own.__get__(None, cls)
        view = make(*args, **initkwargs)
        if isinstance(getattr(view, "_non_atomic_requests", None), RecordAlias):
            return view
        return _selectively_atomic(view, cls)

    as_view._exempts = True  # type: ignore[attr-defined]
    setattr(view_class, "as_view", classmethod(as_view))  # noqa: B010 - a class of any kind


def _selectively_atomic(view: Callable[..., Any], view_class: type) -> Callable[..., Any]:
    exempt = set(getattr(view, "_non_atomic_requests", ()))
    is_async = iscoroutinefunction(view)

    @functools.wraps(view)
    def wrapper(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        if is_async or _protects(view_class, request, getattr(view, "actions", None)):
            return view(request, *args, **kwargs)
        return as_atomic_request(functools.partial(view, request, *args, **kwargs), exempt)

    if is_async:
        markcoroutinefunction(wrapper)
    wrapper._non_atomic_requests = RecordAlias(exempt)  # type: ignore[attr-defined]
    return wrapper


def _protects(view_class: type, request: HttpRequest, actions: dict[str, str] | None) -> bool:
    method = (request.method or "").lower()
    name = actions.get(method, method) if actions else method
    operation = protected_operation(view_class, name)
    return operation is not None and request.method in operation.methods


def protected_operation(view_class: type, name: str) -> Operation | None:
    """The operation that protects the handler ``name`` of a class, by decorator or by a mixin's mapping."""
    handler = getattr(view_class, name, None)
    while handler is not None and not isinstance(handler, Protected):
        handler = getattr(handler, "__wrapped__", None)
    if handler is not None:
        return handler.operation
    of_mixin = getattr(view_class, "idempotent_operation", None)
    return None if of_mixin is None else of_mixin(name)


def _request_among(args: tuple[Any, ...]) -> Any | None:
    """The request: the first argument of a function, the second of a method."""
    for argument in args[:2]:
        if adapter_type_for(argument) is not None:
            return argument
    return None


def _route(request: Any, kwargs: dict[str, Any]) -> dict[str, object]:
    match = getattr(request, "resolver_match", None)
    arguments: dict[str, object] = dict(kwargs if match is None else match.kwargs)
    if match is not None:
        arguments.update((str(position), value) for position, value in enumerate(match.args))
    return {name: _comparable(value) for name, value in arguments.items()}


#: In the text of an object that has none of its own: where it is in memory.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def _comparable(value: object) -> object:
    """A route argument as the fingerprint takes it. A converter may return anything, down to a model instance.

    :raises TypeError: it has no text that is the same for a retry.
    """
    if isinstance(value, Model):
        return [value._meta.label, _comparable(value.pk)]
    if isinstance(value, (str, int, UUID, date, Decimal)):
        return value
    text = str(value)
    if _ADDRESS.search(text):
        raise TypeError(
            f"A route argument of type {type(value).__qualname__} has no text of its own, only an address in memory, "
            f"so a retry could not be told from another request. Give the type a __str__ that tells its values apart."
        )
    return text


def _refuse_unprotectable(operation: Operation, view: Any) -> None:
    name = operation.name
    if isinstance(view, type):
        raise ImproperlyConfigured(
            f"@idempotent({name!r}) goes on a method of {view.__name__}, not on the class; for a DRF view use "
            f"IdempotentMixin and idempotent_operations."
        )
    if isinstance(view, (staticmethod, classmethod)) or not callable(view):
        raise ImproperlyConfigured(f"@idempotent({name!r}) goes on a view or a method, not on {view!r}.")
    if hasattr(getattr(view, "cls", None), "handle_exception"):
        raise ImproperlyConfigured(
            f"@idempotent({name!r}) stands above @api_view or around as_view(), where it would run before "
            f"authentication and permissions. Put it below @api_view, on the handler method, or use IdempotentMixin."
        )
