"""Refuses changes to a response's context or data after rendering, because they would reach no client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured

from ..operation import Operation

#: The attributes from which Django's ``TemplateResponse`` and DRF's ``Response`` are rendered.
_SOURCES: Final = ("context_data", "data")


def refuse_late_changes(response: Any, operation: Operation) -> None:
    """Make ``render()`` raise ``ImproperlyConfigured`` if the context or the data changes from now on.

    Django calls ``render()`` after all decorators of the view, even on a rendered response.

    :param response: a rendered response that has the method ``render()``.
    """
    rendered_from = _sources_of(response)

    def render() -> Any:
        del response.render  # once is enough, and a cache can't pickle this function
        for name, value in _sources_of(response).items():
            if value != rendered_from[name]:
                raise ImproperlyConfigured(
                    f"The {name} of the response of {operation} was changed after the response had been rendered, so "
                    f"the change would reach no client. Middleware, decorators above @idempotent and overrides that "
                    f"call a protected super() method run too late. Change the {name} in the protected handler or in a "
                    f"decorator below @idempotent, or return a new response."
                )
        return response

    response.render = render


def _sources_of(response: Any) -> dict[str, Any]:
    return {name: _copied(getattr(response, name, None)) for name in _SOURCES}


def _copied(value: Any) -> Any:
    """``value`` with its dicts and lists copied, so that a later change inside it is detected."""
    if isinstance(value, Mapping):
        return {name: _copied(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(each) for each in value]
    return value
