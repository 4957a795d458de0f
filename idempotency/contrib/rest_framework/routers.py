"""Routers that protect the unsafe actions of their viewsets, for requests with a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from rest_framework import routers

from ...foreign import VIEW_ARGUMENTS, VIEW_CLASS
from ...http.atomic_requests import databases_with_atomic_requests, exempt, opens_its_transactions
from ...http.protection import protection_of
from ...operation import Operation
from ...views.decorators import Protected, dotted, refuse_atomic
from ...views.layers import inherited, refuse_skipped
from ...views.view_classes import operation_named_after, refuse_shared_name

__all__ = ["DefaultRouter", "IdempotentRouterMixin", "SimpleRouter"]


#: Names that as_view() of a viewset takes or assigns. It also refuses the names of HTTP methods.
_TAKEN = frozenset({"actions", "basename", "description", "detail", "name", "suffix"})


class _ByRouter(Protected):
    """An attribute of a view's instance that hides the action of the same name."""

    def __init__(self, operation: Operation, viewset: Any, action: str) -> None:
        refuse_skipped(operation, viewset, action)
        super().__init__(operation, inherited(None, action, getattr(viewset, action)))
        self.__set_name__(viewset, action)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self._is_seen = name, True  # without changing the class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        view = getattr(self._adapter_for(args, kwargs), "view", None)
        if view is None:
            raise TypeError(f"{self.operation} was called without the request of Django REST framework.")
        return super().__call__(view, *args, **kwargs)


class IdempotentRouterMixin:
    """Adds protected actions to the arguments of ``as_view()``, which DRF sets on each instance, so neither classes nor
    URLs change. An action that has an operation keeps it.

    Put the mixin before the router among the bases.
    """

    def get_routes(self, viewset: Any) -> list[Any]:
        routes = super().get_routes(viewset)  # type: ignore[misc]
        return [
            route._replace(initkwargs={**route.initkwargs, **_protected(viewset, route.mapping)}) for route in routes
        ]

    def get_urls(self) -> list[Any]:
        urls: list[Any] = super().get_urls()  # type: ignore[misc]
        exempted = {}
        for view in dict.fromkeys(pattern.callback for pattern in urls):
            if any(isinstance(value, _ByRouter) for value in getattr(view, VIEW_ARGUMENTS, {}).values()):
                _refuse_lost_arguments(view)
                if databases_with_atomic_requests() and not opens_its_transactions(view):
                    exempted[view] = exempt(view)
        for pattern in urls:  # the audit recognises a format suffix by the view that it shares with its route
            pattern.callback = exempted.get(pattern.callback, pattern.callback)
        return urls


class SimpleRouter(IdempotentRouterMixin, routers.SimpleRouter):
    pass


class DefaultRouter(IdempotentRouterMixin, routers.DefaultRouter):
    pass


def _protected(viewset: Any, mapping: Mapping[str, str]) -> dict[str, _ByRouter]:
    """Protect the unsafe actions of a route that have no operation. Returns them by name."""
    actions = {action for method, action in mapping.items() if method in ("post", "put", "patch", "delete")}
    names = sorted(name for name in actions if hasattr(viewset, name) and not protection_of(getattr(viewset, name)))
    if names:
        refuse_shared_name(viewset)
        refuse_atomic(viewset, "dispatch")
    for name in sorted(_TAKEN.union(viewset.http_method_names).intersection(names)):
        raise ImproperlyConfigured(
            f"The router can't protect the action {name!r} of {dotted(viewset)}, because DRF's as_view() uses this "
            f"name itself. Rename the action and write url_path={name!r}, or put @idempotent on it."
        )
    protected = {name: _ByRouter(operation_named_after(viewset, name), viewset, name) for name in names}
    for handler in protected.values():
        handler.register()
    return protected


def _refuse_lost_arguments(callback: Any) -> None:
    """:raises ImproperlyConfigured: an ``__init__()`` does not pass on the protected actions."""
    view_class, arguments = getattr(callback, VIEW_CLASS), getattr(callback, VIEW_ARGUMENTS)
    instance = view_class(**arguments)
    for name, value in arguments.items():
        if isinstance(value, _ByRouter) and getattr(instance, name) is not value:
            raise ImproperlyConfigured(
                f"{dotted(view_class)}.__init__() drops its keyword arguments, so the router can't protect {name}(). "
                f"Pass them to super().__init__(), or put @idempotent on the method."
            )
