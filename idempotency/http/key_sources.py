"""Places of a key other than the header: ready values of an operation's ``key``.

They are equal if they read the same place, so a reloaded module declares the same operation again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest

from ..exceptions import KeyInvalidError
from .adapter import adapter_for
from .payload import FORM, MULTIPART, form_values

#: The name of the field and of the template tag that put a key into a form.
FORM_FIELD = "idempotency_key"


@dataclass(frozen=True)
class FromHeader:
    """The key is the value of another header, such as a webhook's event id.

    :param name: the header's name.
    """

    name: str

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


@dataclass(frozen=True)
class FromJSON:
    """The key is a member of a JSON body, such as a webhook's event id.

    :param path: the member's name; for a member of a member both names with a dot between them.
    """

    path: str

    def __str__(self) -> str:
        return f"the body's member {self.path!r}"

    def __call__(self, request: Any) -> str | None:
        http = _http(request)
        if http.content_type in {FORM, MULTIPART}:
            return None  # reading the body of a form would keep it from being parsed, or is no longer possible
        try:
            found: Any = json.loads(http.body)
        except (ValueError, RecursionError):
            return None  # the body is not JSON, so it has no key
        for name in self.path.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        key: str | None = found  # a value of another type is refused, as a malformed key is
        return key


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
