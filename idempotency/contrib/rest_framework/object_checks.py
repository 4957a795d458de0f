"""Checks a view's object before a replay, like the handler's ``get_object()``."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from typing import Any

from django.core.exceptions import ObjectDoesNotExist, ValidationError
from django.db import connections, transaction
from django.http import Http404
from rest_framework.exceptions import NotFound
from rest_framework.permissions import BasePermission
from rest_framework.views import APIView

#: Raised by a lookup for a value that no object can have. DRF responds with 404.
_WRONG_VALUE = (TypeError, ValueError, ValidationError)


def object_checks(view_class: type, permissions: Iterable[Any]) -> set[str]:
    """The names of the methods of a view and its permissions that check an object."""
    names = _object_permissions(permissions)
    if view_class.check_object_permissions is not APIView.check_object_permissions:  # type: ignore[attr-defined]
        names.add(f"{view_class.__name__}.check_object_permissions()")
    return names


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
    """Call ``get_object()``, which checks the caller's permissions, and roll back its writes.

    If the object is gone, there is nothing to check: the operation itself may have deleted it.

    :param arguments: the names from ``arguments_of_lookup``.
    :raises Exception: a check refused the caller, or failed.
    """
    check, refused = view.check_object_permissions, False

    def note_refusal(*args: Any, **kwargs: Any) -> None:
        nonlocal refused
        refused = True
        check(*args, **kwargs)
        refused = False

    view.check_object_permissions = note_refusal
    opened = [each.alias for each in connections.all(initialized_only=True) if each.connection is not None]
    try:
        with ExitStack() as transactions:  # also needed by a query that locks the row
            for using in opened:
                transactions.enter_context(transaction.atomic(using=using))
            view.get_object(**{name: view.kwargs[name] for name in arguments})
            for using in opened:
                transaction.set_rollback(True, using=using)
    except Exception as error:
        # A permission may refuse with a 404, like DjangoObjectPermissions.
        if refused or not _means_that_it_is_gone(error, view):
            raise
    finally:
        view.check_object_permissions = check


def _means_that_it_is_gone(error: BaseException | None, view: Any) -> bool:
    """Whether ``get_object()`` raised the error because its query found nothing."""
    model = getattr(getattr(view, "queryset", None), "model", None)
    if not isinstance(error, (Http404, NotFound)):
        # Another missing object, such as a membership, is a refusal.
        return isinstance(error, ObjectDoesNotExist if model is None else model.DoesNotExist)
    if isinstance(error.__context__, _WRONG_VALUE) or _means_that_it_is_gone(error.__context__, view):
        return True
    # A 404 that the project raises may have any reason.
    lookup = getattr(view, "lookup_url_kwarg", None) or getattr(view, "lookup_field", None)
    if model is None or lookup not in view.kwargs:
        return False
    rows = model._base_manager.using(view.queryset.db)
    try:
        return not rows.filter(**{view.lookup_field: view.kwargs[lookup]}).exists()
    except _WRONG_VALUE:
        return True


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
        operands = [getattr(permission, name) for name in ("op1_class", "op2_class") if hasattr(permission, name)]
        if operands:  # an expression such as IsOwner | IsAdminUser
            names |= _object_permissions(operands)
        elif getattr(permission, "has_object_permission", by_default) is not by_default:
            names.add(f"{permission.__name__}.has_object_permission()")
    return names
