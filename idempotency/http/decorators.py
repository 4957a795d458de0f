"""``@idempotent``: protects a view or a method of a class-based view."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from asgiref.sync import async_to_sync, iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.views import View

from ..operation import Operation, operation_for, registry
from ..options.table import RequestPolicy
from .adapters import Adapter, adapter_for, prepare_view
from .api_view import docstring_of
from .atomic_requests import EveryDatabase, Handler, exempted_by_project
from .class_views import (
    HOOKS,
    guard,
    methods_of_class,
    protects_function,
    protects_handler,
    refuse_excluded,
    refuse_handler,
    served_methods,
)
from .exchange import Exchange, is_running, refusal_of
from .route import route_of

if TYPE_CHECKING:  # Python 3.10 has no Unpack, and only a type checker reads it
    from typing_extensions import Unpack

P = ParamSpec("P")
R = TypeVar("R")


def idempotent(
    operation: str | Operation, **policy: Unpack[RequestPolicy]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a view take effect once for each account and ``Idempotency-Key``.

    Use it on a function view, an async view, a method of a class-based view, a function below ``@api_view``, or a
    method or ``@action`` of a DRF view. Put it closest to the function. Decorators above it (``login_required``,
    ``api_view``, permissions) run before every replay.

    A handler of a class is protected whatever its method. A function may serve several methods; those in ``methods``
    are protected. Two functions can't share the name of an operation, but they can share an ``Operation``.

    :param operation: the operation's name, or an ``Operation`` that is declared elsewhere.
    :param policy: the keyword arguments of ``Operation``, if a name is given.
    :returns: a decorator that keeps the view's signature.
    :raises ImproperlyConfigured: the policy is incomplete or contradictory, another function has the name, or the
        decorated object could not be protected in this place.
    :raises TypeError: there is no keyword argument of this name.
    """
    if callable(operation):  # @idempotent without parentheses
        raise ImproperlyConfigured(
            f'@idempotent needs the name of an operation: write @idempotent("orders.create"), with a name of your own, '
            f"above {getattr(operation, '__qualname__', operation)}."
        )
    declared = operation_for(operation, policy)

    def decorate(view: Callable[P, R]) -> Callable[P, R]:
        return cast("Callable[P, R]", Protected(declared, view, owns_name=isinstance(operation, str)))

    return decorate


class Protected:
    """A view under an operation: callable like the view, and bindable like a method.

    :param owns_name: no other function may be declared under the operation's name.
    """

    _non_atomic_requests: set[str]

    def __init__(self, operation: Operation, view: Callable[..., Any], *, owns_name: bool = False) -> None:
        _refuse_unprotectable(operation, view)
        functools.update_wrapper(self, view)
        # Django Ninja evaluates the annotations of a view in it, because it does not look at __wrapped__.
        self.__globals__ = getattr(view, "__globals__", {})
        self.__doc__ = docstring_of(view, operation)
        self.operation = operation
        self.view = view
        #: The attribute of its class, if it is a handler.
        self.name = getattr(view, "__name__", "")
        self._non_atomic_requests = EveryDatabase(exempted_by_project(view))
        self._is_async = iscoroutinefunction(view)
        if self._is_async:
            markcoroutinefunction(self)
        #: True until the name is bound. A method must know its class first, because it may override another one's
        #: method.
        self._owes_name = owns_name and not _is_stand_in(view)
        if self._owes_name and not _is_in_class_body(view):
            self._own_name([_home_of(view)])
        prepare_view(self)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        refuse_handler(self.operation, owner, name)
        if self._owes_name:
            self._own_name([f"{base.__module__}.{base.__qualname__}.{name}" for base in owner.__mro__])
        guard(owner)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        adapter = next(filter(None, map(adapter_for, args[:2])), None)  # a function's first argument, a method's second
        if adapter is None:
            raise TypeError(
                f"@idempotent({self.operation.name!r}) expects a request as the first argument of "
                f"{getattr(self.view, '__qualname__', self.view)!r}."
            )
        if self._owes_name:  # another decorator has hidden the method from its class
            self._own_name([_home_of(self.view)])
        call = functools.partial(self.view, *args, **kwargs)
        adapter.kwargs = kwargs
        request, http = adapter.request, adapter.http
        if is_running(self.operation, http):
            return call()
        refusal = refusal_of(http)
        if refusal is None and not self._protects(args[0] if args[0] is not request else None, adapter):
            return Handler(call, http, self).pass_through()
        handler = Handler(async_to_sync(call) if self._is_async else call, http, self)
        exchange = Exchange(self.operation, adapter, handler, functools.partial(route_of, http, kwargs))
        respond = exchange.respond if refusal is None else functools.partial(exchange.replay_or_raise, refusal)
        return _shielded(respond) if self._is_async else respond()

    def _own_name(self, homes: list[str]) -> None:
        registry.bind(self.operation.name, homes)
        self._owes_name = False

    def _protects(self, instance: object, adapter: Adapter) -> bool:
        name, request = self.name, adapter.request
        if instance is None and isinstance(self.view, functools.partial):
            # method_decorator(idempotent(...)) wraps the bound method in a function at every call.
            instance = getattr(self.view.func, "__self__", None)
        if isinstance(instance, View):
            if name == "dispatch" or name in HOOKS:  # hidden from its class by another decorator
                refuse_handler(self.operation, type(instance), name)
            return protects_handler(
                self.operation, request.method, served_methods(name, getattr(instance, "action_map", None))
            )
        view_class = getattr(self.view, "view_class", None)  # of as_view()
        served = adapter.served_methods() if view_class is None else methods_of_class(view_class)
        return protects_function(self.operation, request.method, served)


async def _shielded(respond: Callable[[], Any]) -> Any:
    """Run the exchange in the request's thread, to its end even if the client has disconnected.

    Transactions belong to a thread's connection, so claim, handler and completion run in one thread. The handler's
    coroutine runs in this event loop, and what it passes to ``sync_to_async`` runs in that thread again, inside the
    transaction. If the request is cancelled because the client disconnected, it still runs to its end and is recorded,
    because its retry may already be under way. Only then is the cancellation passed on.
    """
    running = asyncio.ensure_future(sync_to_async(respond)())
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        running.exception()  # retrieve an error, so that asyncio does not complain that it was never retrieved
        raise cancelled
    return running.result()


def _is_stand_in(view: Callable[..., Any]) -> bool:
    """Whether ``view`` is the dummy that ``method_decorator`` decorates to copy a decorator's attributes."""
    return getattr(view, "__module__", None) == "django.utils.decorators"


def _is_in_class_body(view: Callable[..., Any]) -> bool:
    outer = getattr(view, "__qualname__", "").rpartition(".")[0]
    return bool(outer) and not outer.endswith("<locals>") and not hasattr(view, "view_class")


def _home_of(view: Any) -> str:
    """Where a view is defined. A reloaded module gives the same text."""
    defined = getattr(view, "view_class", view)  # as_view() makes one function for all classes
    while isinstance(defined, functools.partial) and not hasattr(defined, "__qualname__"):
        defined = defined.func
    if not hasattr(defined, "__qualname__"):
        defined = type(defined)
    return f"{defined.__module__}.{defined.__qualname__}"


def _refuse_unprotectable(operation: Operation, view: Any) -> None:
    name = operation.name
    if isinstance(view, type):
        raise ImproperlyConfigured(
            f"Use @idempotent({name!r}) on a method of {view.__name__}, not on the class; for a DRF view use "
            f"IdempotentMixin and idempotent_operations."
        )
    if isinstance(view, (staticmethod, classmethod)) or not callable(view):
        raise ImproperlyConfigured(f"Use @idempotent({name!r}) on a view or a method, not on {view!r}.")
    if hasattr(getattr(view, "cls", None), "handle_exception"):
        raise ImproperlyConfigured(
            f"@idempotent({name!r}) is above @api_view or around as_view(), where it would run before "
            f"authentication and permissions. Put it below @api_view, on the handler method, or use IdempotentMixin."
        )
    view_class = getattr(view, "view_class", None)
    if view_class is not None and view_class.dispatch is not View.dispatch:
        raise ImproperlyConfigured(
            f"@idempotent({name!r}) is around {view_class.__name__}.as_view(), where it would run before "
            f"its dispatch(), which may check a login or a permission. Put it on the handler method."
        )
    if hasattr(view, "redirect_field_name"):  # set by user_passes_test(), which Django uses for the other two
        raise ImproperlyConfigured(
            f"@idempotent({name!r}) is above login_required, permission_required or user_passes_test, where a replay "
            f"would not check them. Put it below, closest to the function."
        )
    if view_class is not None:
        refuse_excluded(operation, methods_of_class(view_class), f"{view_class.__name__}.as_view()")
