"""The URL patterns of the project."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django.conf import settings as django_settings
from django.urls import URLPattern, URLResolver, get_resolver
from django.urls.resolvers import LocalePrefixPattern, RegexPattern


@dataclass(frozen=True)
class Place:
    """A URL pattern, including the prefixes of the patterns that include it."""

    #: The path, with its variable parts as names in angle brackets.
    route: str
    #: Its name with its namespaces; empty if it has none.
    name: str
    callback: Any
    parameters: frozenset[str]
    in_admin: bool


def places() -> Iterator[Place]:
    """The URL patterns of the project."""
    if getattr(django_settings, "ROOT_URLCONF", None):  # a project may have no URLs
        yield from _places(get_resolver().url_patterns)


def _places(
    patterns: Iterable[URLPattern | URLResolver],
    route: str = "/",
    namespaces: Sequence[str] = (),
    parameters: frozenset[str] = frozenset(),
    in_admin: bool = False,
) -> Iterator[Place]:
    for pattern in patterns:
        here = route + _text_of(pattern.pattern)
        names = parameters | set(pattern.pattern.regex.groupindex)
        if isinstance(pattern, URLResolver):
            inner = [*namespaces, pattern.namespace] if pattern.namespace else namespaces
            # A project's URLs may use the admin's name, but not its views.
            is_admin = pattern.app_name == "admin" and any(
                hasattr(route.callback, "admin_site") for route in pattern.url_patterns
            )
            yield from _places(pattern.url_patterns, here, inner, names, in_admin or is_admin)
        else:
            name = ":".join([*namespaces, pattern.name]) if pattern.name else ""
            yield Place(here, name, pattern.callback, names, in_admin)


def _text_of(pattern: Any) -> str:
    """A readable form of a pattern, for a regular expression the one that Django's admin documentation shows."""
    if isinstance(pattern, LocalePrefixPattern):
        return "<language>/"
    if not isinstance(pattern, RegexPattern):
        return str(pattern)
    from django.contrib.admindocs.views import simplify_regex  # it imports the admin, which few processes need

    return simplify_regex(str(pattern)).removeprefix("/")
