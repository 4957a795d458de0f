"""Finds changes of a response that was rendered and recorded already, so that they would reach no client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest

#: The attribute of Django's request that holds the last ``TemplateResponse`` that was rendered for it, and a copy of
#: its context.
_RENDERED: Final = "_idempotency_rendered"

_CONTAINERS = (dict, list, tuple, Mapping)


def copied(data: Any) -> Any:
    """The data of a response with its dicts and lists copied, so that a later change of one of them shows."""
    if isinstance(data, Mapping):
        return {name: copied(value) if isinstance(value, _CONTAINERS) else value for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [copied(value) if isinstance(value, _CONTAINERS) else value for value in data]
    return data


def late_change(what: str, view: str) -> ImproperlyConfigured:
    return ImproperlyConfigured(
        f"The {what} of a response of {view} was changed after the response had been rendered and recorded, so the "
        f"change would reach no client. An override that calls a protected super() method, and a decorator above "
        f"@idempotent, come too late. Change the {what} in the protected handler or in a decorator below @idempotent, "
        f"or return a new response."
    )


def remember_context(http: HttpRequest, response: Any) -> None:
    setattr(http, _RENDERED, (response, _context_of(response)))


def refuse_changed_context(http: HttpRequest, answer: Any, view: Any) -> Any:
    """:raises ImproperlyConfigured: the context of the answer was changed after its rendering."""
    response, context = getattr(http, _RENDERED, (None, None))
    if response is not None and response is answer and _context_of(answer) != context:
        raise late_change("context_data", getattr(view, "view_class", view).__qualname__)
    return answer


def _context_of(response: Any) -> Any:
    return copied(getattr(response, "context_data", None))  # what another package renders may have none
