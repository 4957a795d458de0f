"""Class-based views: which declarations are refused, and how a class with protected handlers is routed.

``guard()`` wraps ``as_view()`` of the class, because Django uses the callable that ``as_view()`` returns. Wrapping
``dispatch()`` would have no effect if another class in the MRO overrides it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured

from ..operation import Operation
from .adapter import handlers_of, hooks_of
from .handler import exempt, opens_its_transactions
from .protection import RoutedHandler, protection_of


def refuse_excluded(operation: Operation, served: Collection[str], where: str) -> None:
    """:raises ImproperlyConfigured: the operation's own ``methods`` leave out every method that is served."""
    declared: Collection[str] | None = operation.declared["methods"]
    if served and declared is not None and not set(served) & set(declared):
        raise ImproperlyConfigured(
            f"Operation {operation.name!r} protects nothing: {where} serves {', '.join(sorted(served))}, and its "
            f"methods are {', '.join(declared)}. Leave methods= out, or name what is served."
        )


def refuse_hook(operation: Operation, view_class: type, name: str) -> None:
    """:raises ImproperlyConfigured: the method ``name`` of a class is no handler."""
    declared = f"Operation {operation.name!r} is declared for {view_class.__name__}.{name}"
    if name == "dispatch":
        raise ImproperlyConfigured(
            f"{declared}, where it would run before authentication and permissions, so a replay would not check them. "
            f"Protect the handler method, such as post()."
        )
    if name in hooks_of(view_class):
        raise ImproperlyConfigured(
            f"{declared}, which is no handler: its answer is ignored, and the handler would run nevertheless. Protect "
            f"the handler method, such as post()."
        )


def guard(view_class: type) -> None:
    """Wrap ``as_view()`` of a class, so that it checks the declarations and exempts the view from ATOMIC_REQUESTS.

    This is done once per class, and subclasses inherit it. It also works for a mixin without an ``as_view()``.
    """
    if getattr(getattr(view_class, "as_view", None), "_guards", False):
        return
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
        _check(cls, handlers_of(view))
        return exempt(view)

    as_view._guards = True  # type: ignore[attr-defined]
    setattr(view_class, "as_view", classmethod(as_view))  # noqa: B010 - a class of any kind


def inherited(cls: type, name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
    """Call the handler that is next in the MRO, which may be of another class in a subclass of ``cls``."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(cls, self), name)(*args, **kwargs)

    async def await_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await call(self, *args, **kwargs)

    return functools.wraps(handler)(await_call if iscoroutinefunction(handler) else call)


def _check(view_class: Any, handlers: Collection[RoutedHandler]) -> None:
    """Check what is known only when the class is routed: its bases, its methods, and what leads to them."""
    for name in ("dispatch", *sorted(hooks_of(view_class))):
        protection = protection_of(getattr(view_class, name, None))
        if protection is not None:
            refuse_hook(protection.operation, view_class, name)
    for name, declared in getattr(view_class, "idempotent_operations", {}).items():
        if protection_of(getattr(view_class, name, None)) is None:
            raise ImproperlyConfigured(
                f"{view_class.__name__}.{name} was replaced after the class was made, so "
                f"{getattr(declared, 'name', declared)!r} does not protect it. Override it in a subclass."
            )
    for routed in handlers:
        if routed.operation is not None:
            where = f"{view_class.__name__}.{routed.name}, as routed," if routed.name else f"{view_class.__name__}()"
            refuse_excluded(routed.operation, routed.methods, where)
