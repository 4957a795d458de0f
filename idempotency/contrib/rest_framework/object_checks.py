"""The checks of a view on the object that a URL names.

A handler makes them by ``get_object()``, and a replay doesn't call the handler. So they are made before it.
"""

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

#: What a lookup raises for a value that no object could have. DRF answers 404.
_WRONG_VALUE = (TypeError, ValueError, ValidationError)


def object_checks(view_class: type, permissions: Iterable[Any]) -> set[str]:
    """The names of the methods of a view, and of its permissions, that check an object."""
    names = _object_permissions(permissions)
    if view_class.check_object_permissions is not APIView.check_object_permissions:  # type: ignore[attr-defined]
        names.add(f"{view_class.__name__}.check_object_permissions()")
    return names


def arguments_of_lookup(view: Any, parameters: Collection[str], queryset: object, detail: bool) -> list[str] | None:
    """The arguments of a URL that ``get_object()`` of a view, or of its class, takes. Most take none.

    None if there is no such method, or if it can't find the object that the URL names.

    :param parameters: the arguments of the URL.
    :param queryset: the view's attribute, without which DRF's own ``get_object()`` raises an error.
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
    """Find the view's object, which checks the caller's permissions on it, and roll back what that writes.

    If there is no such object any more, there is nothing to check: the operation itself may have deleted it.

    :param arguments: the names from ``arguments_of_lookup``.
    :raises Exception: a check has refused the caller, or could not be made.
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
        with ExitStack() as transactions:  # which the view's query needs, too, if it locks the row
            for using in opened:
                transactions.enter_context(transaction.atomic(using=using))
            view.get_object(**{name: view.kwargs[name] for name in arguments})
            for using in opened:
                transaction.set_rollback(True, using=using)
    except Exception as error:
        # A permission may refuse by a 404, as DjangoObjectPermissions does.
        if refused or not _says_that_it_is_gone(error, view):
            raise
    finally:
        view.check_object_permissions = check


def _says_that_it_is_gone(error: BaseException | None, view: Any) -> bool:
    """Whether ``get_object()`` has raised the error because its query found nothing."""
    model = getattr(getattr(view, "queryset", None), "model", None)
    if not isinstance(error, (Http404, NotFound)):
        # That another object is missing, such as a membership, is a refusal.
        return isinstance(error, ObjectDoesNotExist if model is None else model.DoesNotExist)
    if isinstance(error.__context__, _WRONG_VALUE) or _says_that_it_is_gone(error.__context__, view):
        return True
    # The project's own 404 does not say why.
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
    """Whether a class has a method of DRF's generic views, and it is not DRF's own."""
    from rest_framework.generics import GenericAPIView  # it imports the project's filters

    by_default = getattr(GenericAPIView, name)
    return getattr(view_class, name, by_default) is not by_default


def _object_permissions(permissions: Iterable[Any]) -> set[str]:
    """The names of the methods of those permission classes that look at objects."""
    names: set[str] = set()
    by_default = BasePermission.has_object_permission
    for permission in permissions:
        operands = [getattr(permission, name) for name in ("op1_class", "op2_class") if hasattr(permission, name)]
        if operands:  # of an expression such as IsOwner | IsAdminUser
            names |= _object_permissions(operands)
        elif getattr(permission, "has_object_permission", by_default) is not by_default:
            names.add(f"{permission.__name__}.has_object_permission()")
    return names
