"""The client's key: how it is read from the header and validated.

This module imports nothing of Django. Whatever value it is given, it returns a key or raises ``KeyInvalidError``, and
never another error.

The header is ``Idempotency-Key`` of draft-ietf-httpapi-idempotency-key-header, whose value is a structured-field
string (RFC 9651, section 3.3.3). Most clients send the key without quotes. Both forms are accepted, and ``"abc"`` and
``abc`` are the same key.
"""

from __future__ import annotations

import re
from typing import Final

from ..exceptions import KeyInvalidError

HEADER: Final = "Idempotency-Key"
META_NAME: Final = "HTTP_IDEMPOTENCY_KEY"

# A UUID needs 36 characters. At four bytes a character, the most that any database reserves, 255 fit into any index.
MAX_LENGTH: Final = 255

# Visible ASCII without three characters that have a meaning in structured fields: a comma joins two headers into one
# value, a semicolon starts parameters, and a quote starts a string. A key that contains one of them must be quoted.
_BARE = re.compile(r"[!#-+\--:<-~]+")

# RFC 9651 also allows spaces in a string. A key may not contain them, because people can't see and compare them in a
# log or a support ticket.
_QUOTED = re.compile(r'"((?:[!#-\[\]-~]|\\["\\])+)"')
_ESCAPED = re.compile(r'\\(["\\])')

_VISIBLE = re.compile(r"[!-~]+")

_SHOWN = 8


def parse_header(value: str) -> str:
    """Read the key from a header's value, with or without quotes.

    :raises KeyInvalidError: the value is empty, too long, not ASCII, has parameters, or was sent twice and joined.
    """
    if not isinstance(value, str):
        raise KeyInvalidError
    # White space around a field's value does not belong to the value (RFC 9110, section 5.5).
    value = value.strip(" \t")
    if _BARE.fullmatch(value):
        key = value
    else:
        quoted = _QUOTED.fullmatch(value)
        if quoted is None:
            raise KeyInvalidError
        key = _ESCAPED.sub(r"\1", quoted[1])
    if len(key) > MAX_LENGTH:
        raise KeyInvalidError
    return key


def validate_key(key: object) -> str:
    """Check a key that does not come from a header, and return it. Here commas, semicolons and quotes are allowed.

    :raises KeyInvalidError: the key is not a str of 1 to 255 visible ASCII characters.
    """
    if not isinstance(key, str) or len(key) > MAX_LENGTH or _VISIBLE.fullmatch(key) is None:
        raise KeyInvalidError(f"An idempotency key is a str of 1 to {MAX_LENGTH} visible ASCII characters.")
    # Return a plain str, because a subclass may compare, print or hash differently from what is stored.
    return str.__str__(key)


def format_header(key: str) -> str:
    """Write a key as a header's value that ``parse_header`` reads as this key."""
    if _BARE.fullmatch(key):
        return key
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def shorten(key: str) -> str:
    """Shorten a key so that it may be logged: enough to find the record, too little to use the key.

    Somebody who has a key can learn that its operation ran. So a log shows at most eight characters of a key, and never
    more than half of it.
    """
    shown = key[: min(_SHOWN, len(key) // 2)]
    return f"{shown}… ({len(key)} characters)"
