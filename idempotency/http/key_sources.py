"""Places of a key other than the header: ready values of an operation's ``key``.

They are equal if they read the same place, so a reloaded module declares the same operation again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

from django.http import HttpRequest
from django.http.request import HttpHeaders

from ..exceptions import KeyInvalidError
from ..identity import keys
from .adapter import adapter_for
from .payload import FORM, MULTIPART, form_values

#: The name of the field and of the template tag that put a key into a form.
FORM_FIELD = "idempotency_key"

#: The names in ``META`` of the headers that have keys: the standard one, and each of a ``FromHeader``.
KEY_HEADERS: Final = {keys.META_NAME}


@dataclass(frozen=True)
class FromHeader:
    """The key is the value of another header, such as a webhook's event id.

    :param name: the header's name.
    """

    name: str

    def __post_init__(self) -> None:
        KEY_HEADERS.add(HttpHeaders.to_wsgi_name(self.name))

    def __str__(self) -> str:
        return f"the header {self.name}"

    def __call__(self, request: Any) -> str | None:
        return _http(request).headers.get(self.name)


@dataclass(frozen=True)
class FromForm:
    """The key is a field of a form that is sent by POST. See ``idempotency.http.forms``.

    :param field: the field's name.
    """

    field: str = FORM_FIELD

    def __str__(self) -> str:
        return f"the form's field {self.field!r}"

    def __call__(self, request: Any) -> str | None:
        values = form_values(_http(request), self.field)
        if len(values) > 1:
            raise KeyInvalidError("The form has more than one key.")
        return values[0] if values else None


@dataclass(frozen=True, init=False)
class FromJSON:
    """The key is a value in a JSON body, such as a webhook's event id: a text, or an integer.

    ``FromJSON("event.id")`` reads a member of a member, and ``FromJSON("events", 0, "id")`` one of the first
    item of a list.

    :param path: the names of members, and the positions of items from 0 on. A dot separates two names.
    :raises ValueError: the path is empty, or has something other than names and positions.
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
        http = _http(request)
        if http.content_type in {FORM, MULTIPART}:
            return None  # reading the body of a form would keep it from being parsed, or is no longer possible
        try:
            found: Any = json.loads(http.body)
        except (ValueError, RecursionError):
            return None  # the body is not JSON, so it has no key
        for step in self.path:
            if isinstance(step, int):
                found = found[step] if isinstance(found, list) and step < len(found) else None
            else:
                found = found.get(step) if isinstance(found, dict) else None
        key: str | None = str(found) if type(found) is int else found
        return key  # a value of another type is refused, as a malformed key is


@dataclass(frozen=True)
class FromBody:
    """The key is the digest of the body's bytes, for a webhook whose events have no id.

    Two events with the same bytes are one event. A body in the form ``multipart/form-data`` has no key, because its
    boundary is another one at each delivery.
    """

    def __str__(self) -> str:
        return "the bytes of the body"

    def __call__(self, request: Any) -> str | None:
        http = _http(request)
        if http.content_type == MULTIPART or not http.body:
            return None
        return hashlib.sha256(http.body).hexdigest()


@dataclass(frozen=True)
class FromCookie:
    """The key is a cookie, which the page that shows the form has set.

    :param name: the cookie's name.
    """

    name: str

    def __str__(self) -> str:
        return f"the cookie {self.name!r}"

    def __call__(self, request: Any) -> str | None:
        return _http(request).COOKIES.get(self.name)


def _http(request: Any) -> HttpRequest:
    adapter = adapter_for(request)
    http: HttpRequest = request if adapter is None else adapter.http
    return http
