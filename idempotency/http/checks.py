"""A system check of the project's URLs: handlers whose models are written to another database than their records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.apps import AppConfig
from django.conf import settings as django_settings
from django.core import checks
from django.core.checks import CheckMessage, Tags, register
from django.db import router
from django.db.models import Model
from django.urls import URLPattern, URLResolver, get_resolver

from ..operation import Operation
from ..protocol.transactions import alias
from .class_views import protected_operation


@register("idempotency", Tags.urls)
def check_models(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check the models of protected class-based views whose class names its model."""
    if not getattr(django_settings, "ROOT_URLCONF", None):
        return []
    records = alias()
    written = {
        (view_class, model, operation)
        for view_class, names in _served(get_resolver().url_patterns)
        if (model := _model_of(view_class)) is not None and router.db_for_write(model) != records
        for name in names
        if (operation := protected_operation(view_class, name)) is not None and operation.transaction
    }
    return [_warning(*found, records) for found in sorted(written, key=repr)]


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
