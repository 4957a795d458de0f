"""System checks: models in another database than their records, anonymous visitors, headers that browsers keep back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.apps import AppConfig, apps
from django.conf import settings as django_settings
from django.core import checks
from django.core.checks import CheckMessage, Tags, register
from django.db import router
from django.db.models import Model
from django.urls import URLPattern, URLResolver, get_resolver

from ..conf import SETTING, problems_of
from ..identity import keys
from ..operation import Operation, registry
from ..protocol.transactions import alias
from .accounts import user_or_visitor
from .class_views import protected_operation


def declared_operations() -> list[Operation]:
    """All operations of the project, also those of its views.

    Django runs the checks in no certain order, so it may not have imported the views yet.
    """
    if getattr(django_settings, "ROOT_URLCONF", None):
        list(get_resolver().url_patterns)
    return list(registry)


@register("idempotency", Tags.urls)
def check_models(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check the models of protected class-based views whose class names its model."""
    if not getattr(django_settings, "ROOT_URLCONF", None):
        return []
    written = {
        (view_class, model, operation, alias(operation=operation.name))
        for view_class, names in _served(get_resolver().url_patterns)
        for name in names
        if (operation := protected_operation(view_class, name)) is not None and operation.transaction
        if (model := model_written_elsewhere(view_class, operation)) is not None
    }
    return [_warning(*found) for found in sorted(written, key=repr)]


@register("idempotency", Tags.security)
def check_cors(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check whether django-cors-headers, if it is installed, lets browsers send the header."""
    allowed = {name.lower() for name in getattr(django_settings, "CORS_ALLOW_HEADERS", ())}
    if not apps.is_installed("corsheaders") or keys.HEADER.lower() in allowed:
        return []
    return [
        checks.Warning(
            f"CORS_ALLOW_HEADERS does not have {keys.HEADER.lower()!r}, so a browser does not send a request with this "
            f"header from another origin.",
            hint=f'Set CORS_ALLOW_HEADERS = (*corsheaders.defaults.default_headers, "{keys.HEADER.lower()}").',
            id="idempotency.W012",
        )
    ]


def _served(patterns: Iterable[URLPattern | URLResolver]) -> Iterator[tuple[Any, set[str]]]:
    """Each class that the URLs lead to, with the names of the handlers that they lead to."""
    for pattern in patterns:
        if isinstance(pattern, URLResolver):
            yield from _served(pattern.url_patterns)
            continue
        view_class = getattr(pattern.callback, "cls", getattr(pattern.callback, "view_class", None))
        if view_class is not None:
            actions = getattr(pattern.callback, "actions", None)
            yield view_class, set(view_class.http_method_names if actions is None else actions.values())


def model_written_elsewhere(view_class: Any, operation: Operation) -> type[Model] | None:
    """The model of a class that names it, if that is written to another database than the operation's records."""
    model = _model_of(view_class)
    return None if model is None or router.db_for_write(model) == alias(operation=operation.name) else model


def _model_of(view_class: Any) -> type[Model] | None:
    meta = getattr(getattr(view_class, "serializer_class", None), "Meta", None)
    sources = (getattr(view_class, "queryset", None), view_class, meta)
    found = (getattr(source, "model", None) for source in sources if source is not None)
    return next((model for model in found if isinstance(model, type) and issubclass(model, Model)), None)


def _warning(view_class: type, model: type[Model], operation: Operation, records: str) -> CheckMessage:
    using = router.db_for_write(model)
    return checks.Warning(
        f"Operation {operation.name!r} of {view_class.__name__} has transaction=True in the records' database, "
        f"{records!r}, but {model._meta.label} is written to database {using!r}. A crash between the commits leaves "
        f"an effect without its outcome, and a retry runs the operation again.",
        hint=f"Keep the records in {using!r}, or declare the operation with transaction=False and its recovery.",
        id="idempotency.W010",
    )


@register("idempotency")
def check_visitors(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Say what an anonymous account means, where an operation accepts one."""
    if problems_of(getattr(django_settings, SETTING, {})):
        return []
    names = sorted(
        repr(operation.name)
        for operation in declared_operations()
        if not operation.problems() and operation.account is user_or_visitor
    )
    if not names:
        return []
    return [
        checks.Warning(
            f"Anonymous visitors may use {', '.join(names)}. Only a cookie says who a visitor is: one who deletes it, "
            f"uses another browser or logs in is another account, and a retry with the same key runs again.",
            hint="Call remember_visitor() where the form is shown. Silence this check if a second run is acceptable.",
            id="idempotency.W011",
        )
    ]
