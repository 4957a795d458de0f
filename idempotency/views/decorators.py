"""``@idempotent``: protects a view or a method of a class-based view, or refuses to."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection, Mapping
from contextvars import Context, copy_context
from types import MethodType
from typing import Any, ParamSpec, TypeVar, Unpack, cast

from asgiref.sync import AsyncToSync, async_to_sync, iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.views import View

from .. import foreign
from ..http.adapter import Adapter, adapter_for, adapters, advice_on_adapters, handlers_of, hooks_of
from ..http.atomic_requests import EveryDatabase, UnprotectedCall, exempt, exempted_by_project, opens_its_transactions
from ..http.exchange import Exchange
from ..http.handler import is_running, runs
from ..http.protection import (
    SAFE_METHODS,
    Protection,
    RoutedHandler,
    handlers_of_class,
    methods_of_class,
    protection_of,
    protects_function,
    protects_handler,
)
from ..http.stack import class_of
from ..operation import Operation, operation_for, registry
from ..options.table import RequestArguments
from .layers import is_within_atomic, refuse_layers, refuse_skipped

P = ParamSpec("P")
R = TypeVar("R")


def idempotent(
    operation: str | Operation = "", **policy: Unpack[RequestArguments]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a view take effect once for each account and ``Idempotency-Key``.

    Use it on a function view, an async view, a method of a class-based view, a function below ``@api_view``, or a
    method or ``@action`` of a DRF view. Put it closest to the function. Decorators above it (``login_required``,
    ``api_view``, permissions) run before every replay.

    A handler of a class is protected for any method, a function for the methods in ``methods``. Two functions can't
    share the name of an operation, but they can share an ``Operation``.

    :param operation: the operation's name, or an ``Operation`` declared elsewhere.
    :param policy: the keyword arguments of ``Operation.declare()``, if a name is given.
    :returns: a decorator that keeps the view's signature.
    :raises ImproperlyConfigured: the policy is incomplete or contradictory, another function has the name, or the
        decorated object can't be protected here.
    :raises TypeError: a keyword argument is unknown.
    """
    if callable(operation) or operation == "":  # without parentheses, or with empty ones
        above = f" above {dotted(operation)}" if operation else ""
        raise ImproperlyConfigured(
            f'@idempotent needs the name of an operation. For example, write @idempotent("orders.create"){above}.'
        )
    declared = operation_for(operation, policy)

    def decorate(view: Callable[P, R]) -> Callable[P, R]:
        protected = Protected(declared, view, owns_name=isinstance(operation, str))
        protected.register()
        for adapter in adapters:
            adapter.prepare_view(protected)
        return cast("Callable[P, R]", protected)

    return decorate


class Protected(Protection):
    """A view under an operation: callable like the view, and bindable like a method.

    :param owns_name: no other function may be declared under the operation's name.
    """

    def __init__(self, operation: Operation, view: Callable[..., Any], *, owns_name: bool = False) -> None:
        _refuse_unprotectable(operation, view)
        # Django Ninja evaluates a view's annotations in its globals, without __wrapped__.
        functools.update_wrapper(self, view, (*functools.WRAPPER_ASSIGNMENTS, "__globals__"))
        super().__init__(operation, view)
        #: The attribute's name in the class, if it is a handler, and whether Python called __set_name__. It doesn't if
        #: another decorator is above.
        self.name, self._is_seen = getattr(view, "__name__", ""), False
        #: The class, if as_view() made the view.
        self._view_class = class_of(view)
        foreign.exempt_on(self, EveryDatabase(self, exempted_by_project(view)))
        self._is_async = iscoroutinefunction(view)
        if self._is_async:
            markcoroutinefunction(self)
        #: True until the name is bound. A method must know its class first: it may override an inherited method.
        self._owes_name = owns_name

    def register(self) -> None:
        """Note that the operation protects a handler, and that its name belongs to a function."""
        registry.note_handler(self.operation)
        outer = getattr(self.view, "__qualname__", "").rpartition(".")[0]
        is_in_class_body = outer and not outer.endswith("<locals>") and self._view_class is None
        if self._owes_name and not is_in_class_body:
            self._own_name([_home_of(self.view)])

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self._is_seen = name, True
        refuse_hook(self.operation, owner, name)
        refuse_layers(self.operation, self.view, is_method=True)
        if name in View.http_method_names:
            refuse_excluded(self.operation, [name.upper()], f"{owner.__name__}.{name}")
        if self._owes_name:
            self._own_name([f"{base.__module__}.{base.__qualname__}.{name}" for base in owner.__mro__])
        guard(owner)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        adapter = self._adapter_for(args, kwargs)
        call = functools.partial(self.view, *args, **kwargs)
        if runs.get():  # a handler may call the view
            if self._is_async:
                return self._respond_within_a_run(call, adapter)
            if is_running(self.operation, adapter.http):
                return call()
        return self._respond(call, adapter)

    async def _respond_within_a_run(self, call: functools.partial[Any], adapter: Adapter) -> Any:
        # Checked in the thread in which the handler's queries would run.
        if await sync_to_async(is_running)(self.operation, adapter.http):
            return await call()
        return await self._respond(call, adapter)

    def _adapter_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Adapter:
        """The adapter for the request: a method's second argument, a function's first, or a keyword argument."""
        adapter = next(filter(None, map(adapter_for, args[1::-1])), None)
        if adapter is None:
            adapter = next(filter(None, map(adapter_for, kwargs.values())), None)
            if adapter is None:
                raise TypeError(
                    f"@idempotent({self.operation.name!r}) expects a request as the first argument of "
                    f"{_home_of(self.view)}.{advice_on_adapters()}"
                )
            kwargs = {name: value for name, value in kwargs.items() if value is not adapter.request}
        adapter.kwargs = kwargs
        return adapter

    def _respond(self, call: functools.partial[Any], adapter: Adapter) -> Any:
        """Answer by an exchange, or by the unprotected handler. Returns an awaitable if the view is async."""
        handler = UnprotectedCall(call, adapter.http, self)
        if not self._protects(call.args, adapter):
            return handler.pass_through()
        exchange = Exchange(self.operation.policy, adapter, handler)
        if self._is_async:
            return _respond_later(exchange)
        response = exchange.answer()
        return exchange.label(handler.pass_through()) if response is None else response

    def _protects(self, args: tuple[Any, ...], adapter: Adapter) -> bool:
        if self._owes_name:  # because another decorator hides the method from its class
            self._own_name([_home_of(self.view)])
        method = adapter.http.method or ""
        if args and isinstance(args[0], View):
            if not self._is_seen:
                refuse_hook(self.operation, type(args[0]), self.name)
            # Only for a safe method does it matter which other ones the handler serves.
            served = adapter.served_methods(self.name) if method in SAFE_METHODS else ()
            return protects_handler(self.operation, method, served)
        served = adapter.served_methods("") if self._view_class is None else methods_of_class(self._view_class)
        return protects_function(self.operation, method, served)

    def _own_name(self, homes: list[str]) -> None:
        registry.bind(self.operation.name, homes)
        self._owes_name = False


async def _respond_later(exchange: Exchange) -> Any:
    """Answer the request of an async view. Without a key it is awaited here, as if it were undecorated."""
    handler = exchange.handler
    view = handler.call

    async def run() -> Any:
        executors = foreign.executors(AsyncToSync)
        executor = _HandlersThread(foreign.executor(executors))
        foreign.set_executor(executors, executor)
        try:
            return await view()
        finally:
            executor.has_ended = True

    handler.call = async_to_sync(run)
    response = await _shielded(exchange.answer)
    if response is not None:
        return response
    handler.call = view
    return exchange.label(await handler.pass_through())


class _HandlersThread:
    """asgiref's executor of the thread that runs an async handler, while the handler runs.

    A task that the handler has started may outlive it. asgiref finds this executor in the task's context and would
    raise an error, because the thread waits for no more calls. If it finds nothing, which is false, it chooses another
    thread, as for a task of an unprotected view.
    """

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.has_ended = False

    def __bool__(self) -> bool:
        return not self.has_ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


async def _shielded(respond: Callable[[], Any]) -> Any:
    """Run the exchange in the request's thread, to its end even if the client disconnects.

    Transactions belong to a thread's connection, so claim, handler and completion run in one thread. The handler's
    coroutine runs in this event loop, and its calls through ``sync_to_async`` run in that thread, inside the
    transaction. A request that is cancelled because its client disconnected is still recorded, because its retry may
    already be on its way. Then the cancellation is re-raised.
    """

    async def respond_in_thread() -> Any:
        try:
            return await sync_to_async(respond)()
        finally:
            left.append(copy_context())

    left: list[Context] = []
    running = asyncio.ensure_future(respond_in_thread())
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    # The task had a copy of the context. An unprotected view shares its context with the middleware above it.
    for context in left:
        for variable, value in context.items():
            variable.set(value)
    if cancelled is not None:
        running.exception()  # otherwise asyncio complains that it was never retrieved
        raise cancelled
    return running.result()


def _home_of(view: Any) -> str:
    """The dotted path of a view's definition, which reloading the module does not change."""
    defined = class_of(view) or view  # as_view() makes one function for all classes
    while isinstance(defined, functools.partial) and not hasattr(defined, "__qualname__"):
        defined = defined.func
    return dotted(defined)


def dotted(view: Any) -> str:
    """The dotted path of a function or a class, or of an object's class."""
    named: Any = view if hasattr(view, "__qualname__") else type(view)
    return f"{named.__module__}.{named.__qualname__}"


def _refuse_unprotectable(operation: Operation, view: Any) -> None:
    name = operation.name
    if isinstance(view, type):
        raise ImproperlyConfigured(
            f"Use @idempotent({name!r}) on a method of {view.__name__}, not on the class, or use IdempotentMixin."
        )
    if isinstance(view, (staticmethod, classmethod)) or not callable(view):
        raise ImproperlyConfigured(f"Use @idempotent({name!r}) on a view or a method, not on {view!r}.")
    if view.__module__ == "django.utils.decorators":  # the function that method_decorator() decorates first
        raise ImproperlyConfigured(
            f"@idempotent({name!r}) is within method_decorator(), which hides it from the class. Put it on the method "
            f"itself, without method_decorator(), or write in the class body: post = idempotent({name!r})(Base.post)"
        )
    if hasattr(view, foreign.NINJA_OPERATION):
        raise ImproperlyConfigured(
            f"@idempotent({name!r}) is above Ninja's decorator, which has registered the unprotected function as a "
            f"route. Put it below, closest to the function."
        )
    view_class = class_of(view)
    if view_class is not None and view_class.dispatch is not View.dispatch:
        raise ImproperlyConfigured(
            f"@idempotent({name!r}) is above @api_view or around {view_class.__name__}.as_view(), so a replay would "
            f"skip dispatch(), which may check a login or a permission. Put it on the handler, or below @api_view."
        )
    refuse_layers(operation, view)
    if view_class is not None:
        for routed in handlers_of_class(view_class):
            if not SAFE_METHODS.issuperset(routed.methods):
                refuse_skipped(operation, view_class, routed.name)
        refuse_excluded(operation, methods_of_class(view_class), f"{view_class.__name__}.as_view()")


def refuse_excluded(operation: Operation, served: Collection[str], where: str) -> None:
    """:raises ImproperlyConfigured: ``methods`` of the operation contain none of the served methods."""
    declared: Collection[str] | None = operation.declared["methods"]
    if served and declared is not None and not set(served) & set(declared):
        raise ImproperlyConfigured(
            f"{operation} protects nothing: {where} serves {', '.join(sorted(served))}, and its methods are "
            f"{', '.join(declared)}. Leave methods= out, or name the served methods."
        )


def refuse_hook(operation: Operation, view_class: type, name: str) -> None:
    """:raises ImproperlyConfigured: the method ``name`` of a class is not a handler."""
    declared = f"{operation} is declared for {view_class.__name__}.{name}"
    if name == "dispatch":
        raise ImproperlyConfigured(
            f"{declared}, where it would run before authentication and permissions, so a replay would not check them. "
            f"Protect the handler method, such as post()."
        )
    if name in hooks_of(view_class):
        raise ImproperlyConfigured(
            f"{declared}, which is not a handler: its return value is ignored, and the handler would still run. "
            f"Protect the handler method, such as post()."
        )


def guard(view_class: type, complete: Callable[[Any, Any], None] | None = None) -> None:
    """Make ``as_view()`` of a class, or of a mixin, check the declarations and exempt the view from ATOMIC_REQUESTS.

    Wrapping ``dispatch()`` would have no effect if another class in the MRO overrides it. The work of a base's guarded
    ``as_view()`` is not repeated.

    :param complete: called with the class and its view before the check.
    """
    own = view_class.__dict__.get("as_view")

    def as_view(cls: Any, *args: Any, **initkwargs: Any) -> Any:
        if "idempotent_operations" in initkwargs:
            raise ImproperlyConfigured(
                f"idempotent_operations is an attribute of the class {cls.__name__}, not an argument of as_view()."
            )
        inherited: Any = super(view_class, cls)
        make = inherited.as_view if own is None else own.__get__(None, cls)
        view = make(*args, **initkwargs)
        if opens_its_transactions(view):
            return view
        if complete is not None:
            complete(cls, view)
        refuse_class(cls, handlers_of(view))
        return exempt(view)

    setattr(view_class, "as_view", classmethod(as_view))  # noqa: B010 - a class of any kind


def refuse_atomic(view_class: Any, name: str) -> None:
    """:raises ImproperlyConfigured: a method opens a transaction above a protection, which can't commit a claim."""
    if is_within_atomic([getattr(view_class, name)]):
        raise ImproperlyConfigured(
            f"transaction.atomic is on {view_class.__name__}.{name}() above the protection, where no claim can be "
            f"committed. Leave it out, because the handler runs in the operation's transaction."
        )


def refuse_class(view_class: Any, handlers: Collection[RoutedHandler]) -> None:
    """Check the bases and methods, which are known only when the class is routed.

    :raises ImproperlyConfigured: a handler that is declared protected would not be, or a replay would skip a check.
    """
    for name in ("dispatch", *sorted(hooks_of(view_class))):
        protection = protection_of(getattr(view_class, name, None))
        if protection is not None:
            refuse_hook(protection.operation, view_class, name)
    if any(routed.operation is not None for routed in handlers):
        refuse_atomic(view_class, "dispatch")
    mapping = getattr(view_class, "idempotent_operations", {})
    for name, declared in mapping.items() if isinstance(mapping, Mapping) else ():
        if protection_of(getattr(view_class, name)) is None:
            raise ImproperlyConfigured(
                f"{view_class.__name__}.{name} was replaced after the class was made, so "
                f"{operation_for(declared, {})} does not protect it. Override it in a subclass."
            )
    for routed in handlers:
        if routed.operation is not None:
            where = f"{view_class.__name__}.{routed.name}, as routed," if routed.name else f"{view_class.__name__}()"
            refuse_excluded(routed.operation, routed.methods, where)
            if routed.name:
                refuse_atomic(view_class, routed.name)
                refuse_skipped(routed.operation, view_class, routed.name)
