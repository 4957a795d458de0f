"""The route of a request, as the fingerprint uses it.

Two URL patterns of one view are two places, unless they have the same name. The pattern's name with its namespaces
identifies the place. The path is not used, because a trailing slash, a prefix, a language or a proxy may change it. If
a pattern has no name, its text is used, without its last slash. If a retry reaches another place than the first
request, its key counts as reused: the retry never runs and never gets the outcome of the other place.
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

#: The name of the place among the route's arguments. No argument can have this name.
PLACE = ""


def route_of(request: HttpRequest, kwargs: dict[str, Any]) -> dict[str, object]:
    """The place of a request and the arguments of its route by name or position.

    :param kwargs: the arguments of the view. They are used only if no URL led to the view.
    :raises TypeError: an argument has no text that is the same for a retry.
    """
    match = request.resolver_match
    if match is None:
        return {name: _comparable(value) for name, value in kwargs.items()}
    arguments = {str(position): value for position, value in enumerate(match.args)} | match.kwargs
    return {PLACE: _place(match)} | {name: _comparable(value) for name, value in arguments.items()}


def _place(match: ResolverMatch) -> str:
    return match.view_name if match.url_name else f"/{(match.route or '').rstrip('/?$')}"


#: The memory address in the default text of an object.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def _comparable(value: object) -> object:
    """A route argument in a form that can be fingerprinted. A converter may return anything, even a model instance.

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
            f"so a retry would look like another request. Give the type a __str__ that is different for each value."
        )
    return text
