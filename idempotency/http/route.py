"""Where a request went, as far as the fingerprint takes it into account.

Two URL patterns of one view are two places, unless they have one name. The pattern's name tells them apart, with its
namespaces. The path itself plays no part, because it changes where nothing else does: with a trailing slash, a prefix,
a language, or a proxy. Only of a pattern without a name the text of the pattern is taken, without its last slash.
A retry that reaches another place than its first request is told that the key was used for something else; it is never
answered with the other place's outcome, and never runs.
"""

from __future__ import annotations

import re
from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.db.models import Model
from django.http import HttpRequest
from django.urls import ResolverMatch

#: The name of the place among the route's arguments, of which none can be called so.
PLACE = ""


def route_of(request: HttpRequest, kwargs: dict[str, Any]) -> dict[str, object]:
    """The place of a request and its route's arguments by name or position.

    :param kwargs: what the view was called with. It counts only if no URL led to the view.
    :raises TypeError: an argument has no text that is the same for a retry.
    """
    match = request.resolver_match
    if match is None:
        return {name: _comparable(value) for name, value in kwargs.items()}
    arguments = {str(position): value for position, value in enumerate(match.args)} | match.kwargs
    return {PLACE: _place(match)} | {name: _comparable(value) for name, value in arguments.items()}


def _place(match: ResolverMatch) -> str:
    return match.view_name if match.url_name else f"/{(match.route or '').rstrip('/?$')}"


#: In the text of an object that has none of its own: where it is in memory.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def _comparable(value: object) -> object:
    """A route argument as the fingerprint takes it. A converter may return anything, down to a model instance.

    :raises TypeError: it has no text that is the same for a retry.
    """
    if isinstance(value, Model):
        return [value._meta.label, _comparable(value.pk)]
    if isinstance(value, (str, int, UUID, date, Decimal)):
        return value
    text = str(value)
    if _ADDRESS.search(text):
        raise TypeError(
            f"A route argument of type {type(value).__qualname__} has no text of its own, only an address in memory, "
            f"so a retry could not be told from another request. Give the type a __str__ that tells its values apart."
        )
    return text
