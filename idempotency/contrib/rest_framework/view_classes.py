"""The handlers of DRF's view classes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import CodeType
from typing import Any

from rest_framework.views import APIView

from ...foreign import API_VIEW
from ...http.protection import Protection, RoutedHandler, handlers_of_class, methods_of_class
from ...http.stack import held_by
from ...views.layers import codes_within

#: The code of decorators that check nothing.
HARMLESS: frozenset[CodeType] = frozenset()
with suppress(ImportError):
    from drf_spectacular.drainage import isolate_view_method

    HARMLESS = frozenset(codes_within(isolate_view_method))  # @extend_schema_view wraps inherited handlers with it


def function_of(view_class: Any) -> Any:
    """The function from which ``@api_view`` of DRF or adrf created the class, or None."""
    for name in view_class.http_method_names if issubclass(view_class, APIView) else ():
        handler = vars(view_class).get(name)
        if getattr(handler, "__qualname__", "").startswith(API_VIEW):
            return next(filter(callable, held_by(handler)), None)
    return None


def handlers_of_view(
    view_class: Any, actions: Mapping[str, str] | None, arguments: Mapping[str, Any]
) -> list[RoutedHandler]:
    """The handlers of a class: the actions of a ViewSet, the function below ``@api_view``, or the class's methods.

    :param actions: the actions of a ViewSet by method in lower case, or None.
    :param arguments: the attributes of its instances, among them the actions that a router protects.
    """
    if actions is not None:
        return [
            RoutedHandler(
                routed if isinstance(routed := arguments.get(name), Protection) else getattr(view_class, name),
                frozenset(method.upper() for method, action in actions.items() if action == name),
                name,
            )
            for name in sorted(set(actions.values()))
        ]
    function = function_of(view_class)
    if function is not None:
        return [RoutedHandler(function, frozenset(methods_of_class(view_class)))]
    return handlers_of_class(view_class)
