"""Checks a view's object before a replay, like the handler's ``get_object()``."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from threading import local
from typing import Any

from django.core.exceptions import ObjectDoesNotExist
from django.db import connections, transaction
from django.db.backends.signals import connection_created
from django.dispatch import receiver
from django.http import Http404
from rest_framework.permissions import BasePermission
from rest_framework.views import APIView

from ...foreign import OPERANDS


def object_checks(view_class: type, permissions: Iterable[Any]) -> set[str]:
    """The names of the methods of a view and its permissions that check an object."""
    names = _object_permissions(permissions)
    if view_class.check_object_permissions is not APIView.check_object_permissions:  # type: ignore[attr-defined]
        names.add(f"{view_class.__name__}.check_object_permissions()")
    return names


def may_refuse(view: Any) -> bool:
    """Whether ``get_object()`` of a view may refuse an object that exists."""
    return bool(
        any(overrides(type(view), name) for name in ("get_object", "get_queryset", "filter_queryset"))
        or getattr(view, "filter_backends", ())
        or object_checks(type(view), map(type, view.get_permissions()))
    )


def arguments_of_lookup(view: Any, parameters: Collection[str], queryset: object, detail: bool) -> list[str] | None:
    """The URL arguments that ``get_object()`` of a view or a class takes, usually none. None if it can't be called.

    :param parameters: the arguments of the URL.
    :param queryset: the view's attribute, without which DRF's ``get_object()`` raises an error.
    :param detail: whether the URL leads to one object even if no argument names it, as ``/profile/`` does.
    """
    view_class: Any = view if isinstance(view, type) else type(view)
    if not hasattr(view_class, "get_object") or getattr(view_class, "view_is_async", False):
        return None
    taken = [*inspect.signature(view_class.get_object).parameters.values()][1:]
    if any(each.default is each.empty and _is_named(each) and each.name not in parameters for each in taken):
        return None
    if names := [each.name for each in taken if _is_named(each) and each.name in parameters]:
        return names
    is_own = overrides(view_class, "get_object")
    if queryset is None and not is_own and not overrides(view_class, "get_queryset"):
        return None
    lookup = getattr(view, "lookup_url_kwarg", None) or getattr(view, "lookup_field", None)
    return [] if lookup in parameters or (is_own and detail) else None


def check_object(view: Any, arguments: Iterable[str]) -> None:
    """Call ``get_object()``, which checks the caller's permissions, and roll back its writes to any database.

    :param arguments: the names from ``arguments_of_lookup``.
    :raises Exception: a check refused the caller, or failed.
    """
    begun: list[str] = []
    with ExitStack() as transactions:  # also needed by a query that locks the row

        def begin(using: str) -> None:
            if using not in begun:
                begun.append(using)
                transactions.enter_context(transaction.atomic(using=using))

        _thread.begin = begin
        transactions.callback(delattr, _thread, "begin")
        for each in connections.all(initialized_only=True):
            if each.connection is not None:
                begin(each.alias)
        try:
            view.get_object(**{name: view.kwargs[name] for name in arguments})
        except ObjectDoesNotExist as error:
            raise Http404 from error
        for using in begun:
            transaction.set_rollback(True, using=using)


#: Has ``begin`` while an object is checked.
_thread = local()


@receiver(connection_created)
def _begin_on_new_connection(connection: Any, **signal: object) -> None:
    """Begin on a database that the check uses first. Django closes connections between requests."""
    begin = getattr(_thread, "begin", None)
    if begin is not None:
        begin(connection.alias)


def _is_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}


def overrides(view_class: Any, name: str) -> bool:
    """Whether a class overrides a method of DRF's generic views."""
    from rest_framework.generics import GenericAPIView  # here, because it imports the project's filters

    by_default = getattr(GenericAPIView, name)
    return getattr(view_class, name, by_default) is not by_default


def _object_permissions(permissions: Iterable[Any]) -> set[str]:
    names: set[str] = set()
    by_default = BasePermission.has_object_permission
    for permission in permissions:
        operands = [getattr(permission, name) for name in OPERANDS if hasattr(permission, name)]
        if operands:  # an expression such as IsOwner | IsAdminUser
            names |= _object_permissions(operands)
        elif getattr(permission, "has_object_permission", by_default) is not by_default:
            names.add(f"{permission.__name__}.has_object_permission()")
    return names
