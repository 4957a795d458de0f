"""The URL patterns of the project, those of included URLconfs among them, and the views behind them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django.conf import settings as django_settings
from django.contrib.admindocs.utils import (
    remove_non_capturing_groups,
    replace_metacharacters,
    replace_named_groups,
    replace_unnamed_groups,
)
from django.urls import URLPattern, URLResolver, get_resolver
from django.urls.resolvers import LocalePrefixPattern, RegexPattern


@dataclass(frozen=True)
class Place:
    """A URL pattern within the patterns that include it."""

    route: str
    """The path, with names in angle brackets in the place of its variable parts."""

    name: str
    """Its name with its namespaces; empty if it has none."""

    callback: Any
    parameters: frozenset[str]
    in_admin: bool
    pattern: URLPattern


def project_resolver() -> URLResolver | None:
    """The resolver of ``ROOT_URLCONF``; None if the project has no URLs."""
    return get_resolver() if getattr(django_settings, "ROOT_URLCONF", None) else None


def places_of(resolver: URLResolver) -> Iterator[Place]:
    """The URL patterns of a URLconf.

    :raises ImproperlyConfigured: they can't be read.
    """
    return _places(resolver.url_patterns)


def dotted(view: Any) -> str:
    """The dotted path of a function or a class, or of an object's class."""
    named: Any = view if hasattr(view, "__qualname__") else type(view)
    return f"{named.__module__}.{named.__qualname__}"


def _places(
    patterns: Iterable[URLPattern | URLResolver],
    route: str = "/",
    namespaces: Sequence[str] = (),
    parameters: frozenset[str] = frozenset(),
    in_admin: bool = False,
) -> Iterator[Place]:
    for pattern in patterns:
        here = route + _text_of(pattern.pattern)
        names = parameters | set(pattern.pattern.converters) | set(_groups_of(pattern.pattern))
        if isinstance(pattern, URLResolver):
            inner = [*namespaces, pattern.namespace] if pattern.namespace else namespaces
            yield from _places(pattern.url_patterns, here, inner, names, in_admin or _is_admin(pattern))
        else:
            name = ":".join([*namespaces, pattern.name]) if pattern.name else ""
            yield Place(here, name, pattern.callback, names, in_admin, pattern)


def _is_admin(resolver: URLResolver) -> bool:
    """Whether these are the URLs of an ``AdminSite``. A project's own URLs may have its name."""
    return resolver.app_name == "admin" and any(
        hasattr(getattr(pattern, "callback", None), "admin_site") for pattern in resolver.url_patterns
    )


def _text_of(pattern: Any) -> str:
    if isinstance(pattern, LocalePrefixPattern):
        return "<language>/"
    if not isinstance(pattern, RegexPattern):
        return str(pattern)
    simplified = replace_unnamed_groups(replace_named_groups(remove_non_capturing_groups(str(pattern))))
    return replace_metacharacters(simplified).replace("\\", "")


def _groups_of(pattern: Any) -> Collection[str]:
    return pattern.regex.groupindex if isinstance(pattern, RegexPattern) else ()
