"""Ready-made values of an operation's ``key``, for keys outside the standard header."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.http.request import HttpHeaders

from ..exceptions import KeyInvalidError
from ..identity import keys
from ..operation import registry
from .adapter import http_of
from .payload import FORM, MULTIPART, form_values

#: The form's field, and the name of the template tag.
FORM_FIELD = "idempotency_key"


class KeySource:
    """A place where a request has its key; ``str()`` describes it. Sources of the same place are equal, so that a
    reloaded module can declare the same operation again.
    """


@dataclass(frozen=True)
class FromHeader(KeySource):
    """The key is the value of another header, such as a webhook's event id.

    :param name: the header's name.
    """

    name: str

    def __str__(self) -> str:
        return f"the header {self.name}"

    def __call__(self, request: Any) -> str | None:
        return http_of(request).headers.get(self.name)


@dataclass(frozen=True)
class FromForm(KeySource):
    """The key is a field of a form sent by POST. ``idempotency.forms`` adds it to the form.

    :param field: the field's name.
    """

    field: str = FORM_FIELD

    def __str__(self) -> str:
        return f"the form's field {self.field!r}"

    def __call__(self, request: Any) -> str | None:
        values = form_values(http_of(request), self.field)
        if len(values) > 1:
            raise KeyInvalidError("The form has more than one key.")
        return values[0] if values else None


@dataclass(frozen=True, init=False)
class FromJSON(KeySource):
    """The key is a string or an integer in a JSON body, such as a webhook's event id.

    ``FromJSON("event.id")`` reads a nested member, and ``FromJSON("events", 0, "id")`` a member of a list's first item.

    :param path: names of members, and positions in lists, from 0. A dot separates two names.
    :raises ValueError: the path is empty, or contains anything else.
    """

    path: tuple[str | int, ...]

    def __init__(self, *path: str | int) -> None:
        steps = [step for part in path for step in (part.split(".") if isinstance(part, str) else [part])]
        if not steps or not all(step >= 0 if type(step) is int else isinstance(step, str) and step for step in steps):
            raise ValueError(f"FromJSON() takes the names of members and the positions of items, not {path!r}.")
        object.__setattr__(self, "path", tuple(steps))

    def __str__(self) -> str:
        return f"the body's member {'.'.join(map(str, self.path))!r}"

    def __call__(self, request: Any) -> str | None:
        http = http_of(request)
        if http.content_type in {FORM, MULTIPART}:
            return None  # reading the body would prevent the form from being parsed, and vice versa
        try:
            found: Any = json.loads(http.body)
        except (ValueError, RecursionError):
            return None
        for step in self.path:
            if isinstance(step, int):
                found = found[step] if isinstance(found, list) and step < len(found) else None
            else:
                found = found.get(step) if isinstance(found, dict) else None
        key: str | None = str(found) if type(found) is int else found
        return key  # a value of another type is refused as a malformed key


@dataclass(frozen=True)
class FromBody(KeySource):
    """The key is the digest of the body's bytes, for a webhook whose events have no id.

    Two events with the same bytes are one event. A multipart form has no key, because its boundary differs at each
    delivery.
    """

    def __str__(self) -> str:
        return "the bytes of the body"

    def __call__(self, request: Any) -> str | None:
        http = http_of(request)
        if http.content_type == MULTIPART or not http.body:
            return None
        return hashlib.sha256(http.body).hexdigest()


def has_key_header(meta: Mapping[str, Any]) -> bool:
    """Whether a request has the standard header, or the header in which some operation finds its key."""
    return keys.META_NAME in meta or any(
        isinstance(source, FromHeader) and HttpHeaders.to_wsgi_name(source.name) in meta
        for source in registry.key_sources()
    )
