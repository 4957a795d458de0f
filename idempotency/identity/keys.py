"""The client's key: from the header's value to the text that identifies one logical operation.

Imports nothing of Django. Whatever is handed in, the answer is a key or a ``KeyInvalidError``, never another exception.

The header is ``Idempotency-Key`` of draft-ietf-httpapi-idempotency-key-header, whose value is a structured-field
string (RFC 9651, section 3.3.3). Most clients send it bare, so both spellings are read, and ``"abc"`` and ``abc`` are
one key.
"""

from __future__ import annotations

import re
from typing import Final

from ..exceptions import KeyInvalidError

HEADER: Final = "Idempotency-Key"
META_NAME: Final = "HTTP_IDEMPOTENCY_KEY"

# A UUID needs 36. Four bytes a character is the most any database counts, and 255 of them fit every index.
MAX_LENGTH: Final = 255

# Visible ASCII without the three characters that mean something around a structured-field item: a comma joins two
# headers into one value, a semicolon starts parameters, a quote starts a string. A key that has them is sent quoted.
_BARE = re.compile(r"[!#-+\--:<-~]+")

# RFC 9651 also allows a space within a string. A key is visible characters only: what can't be seen in a log or a
# support ticket can't be compared there either.
_QUOTED = re.compile(r'"((?:[!#-\[\]-~]|\\["\\])+)"')
_ESCAPED = re.compile(r'\\(["\\])')

_VISIBLE = re.compile(r"[!-~]+")

_SHOWN = 8


def parse_header(value: str) -> str:
    """The key in a header's value, bare or as a structured-field string.

    Raises KeyInvalidError for an empty, over-long, non-ASCII, parameterised or joined (sent twice) value.
    """
    if not isinstance(value, str):
        raise KeyInvalidError
    # Optional white space around a field's value is not part of it (RFC 9110, section 5.5).
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
    """``key`` itself, if it is a key: for callers that don't come through a header, where nothing can be joined.

    Raises KeyInvalidError unless it is a str of 1 to 255 visible ASCII characters.
    """
    if not isinstance(key, str) or len(key) > MAX_LENGTH or _VISIBLE.fullmatch(key) is None:
        raise KeyInvalidError(f"An idempotency key is a str of 1 to {MAX_LENGTH} visible ASCII characters.")
    # A subclass may compare, print or hash in its own way; what is stored is plain text.
    return str.__str__(key)


def shorten(key: str) -> str:
    """A form of a key that may be logged: enough to find the record by, too little to use the key.

    Whoever holds a key can learn that its operation ran, so a log shows eight characters of it at most, and never
    more than half.
    """
    shown = key[: min(_SHOWN, len(key) // 2)]
    return f"{shown}… ({len(key)} characters)"
