"""The client's key: how it is made, parsed and validated, and the timestamp that it may contain.

Invalid values raise only ``KeyInvalidError``.

The value of the header (draft-ietf-httpapi-idempotency-key-header) is a structured-field string (RFC 9651, section
3.3.3). Most clients send the key without quotes, so ``"abc"`` and ``abc`` are the same key.

Version 7 UUIDs (RFC 9562, section 5.7) and ULIDs contain the time at which they were made. A derived key does not,
because it must stay the same even after its record is lost.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Final
from uuid import UUID

from ..exceptions import KeyInvalidError

HEADER: Final = "Idempotency-Key"
META_NAME: Final = "HTTP_IDEMPOTENCY_KEY"

# A UUID needs 36 characters. At four bytes per character, the most that any database reserves, 255 fit into any index.
MAX_LENGTH: Final = 255

# Visible ASCII except characters with a meaning in structured fields: a comma joins two headers into one value, a
# semicolon starts parameters, and a quote starts a string. A key that contains one of them must be quoted.
_BARE = re.compile(r"[!#-+\--:<-~]+")

# RFC 9651 also allows spaces. A key may not contain them, because they are hard to compare in a log or a ticket.
_QUOTED = re.compile(r'"((?:[!#-\[\]-~]|\\["\\])+)"')
_ESCAPED = re.compile(r'\\(["\\])')

_VISIBLE = re.compile(r"[!-~]+")

_SHOWN = 8

# Only the usual spellings. Without hyphens, many random keys of 32 digits would look like version 7.
_UUID7: Final = re.compile(
    r"([0-9a-f]{8})-([0-9a-f]{4})-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE | re.ASCII
)
_ULID: Final = re.compile(r"([0-7][0-9A-HJKMNP-TV-Z]{9})[0-9A-HJKMNP-TV-Z]{16}", re.IGNORECASE | re.ASCII)
#: A derived key, a UUID of version 8, alone or in the key of a message.
_DERIVED: Final = re.compile(
    r"(?:[0-9a-f]{32}\.)?[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE | re.ASCII
)

#: The digits of a ULID (Crockford's base 32).
_DIGITS: Final = {digit: value for value, digit in enumerate("0123456789ABCDEFGHJKMNPQRSTVWXYZ")}


def new_key() -> str:
    """Make a version 7 UUID for one logical operation. Save it before the first attempt, to be able to resume."""
    moment = time.time_ns() // 1_000_000
    high, low = secrets.randbits(12), secrets.randbits(62)
    return str(UUID(int=moment << 80 | 7 << 76 | high << 64 | 0b10 << 62 | low))


def parse_header(value: str) -> str:
    """Parse the key in a header's value, with or without quotes.

    :raises KeyInvalidError: the value is empty, too long, not ASCII, has parameters, or was sent twice and joined.
    """
    if not isinstance(value, str):
        raise KeyInvalidError
    # White space around a field's value is not part of the value (RFC 9110, section 5.5).
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
    """Check a key that doesn't come from a header, and return it. It may contain commas, semicolons and quotes.

    :raises KeyInvalidError: the key is not a str of 1 to 255 visible ASCII characters.
    """
    if not isinstance(key, str) or len(key) > MAX_LENGTH or _VISIBLE.fullmatch(key) is None:
        raise KeyInvalidError(f"An idempotency key is a str of 1 to {MAX_LENGTH} visible ASCII characters.")
    # Return a plain str, because a subclass may compare, print or hash differently from what is stored.
    return str.__str__(key)


def format_header(key: str) -> str:
    """Format a key as a header's value that ``parse_header`` parses as this key."""
    if _BARE.fullmatch(key):
        return key
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def shorten(key: str) -> str:
    """Shorten a key for logs, to at most half, because anyone with the full key can find out whether its operation
    ran."""
    shown = key[: min(_SHOWN, len(key) // 2)]
    return f"{shown}… ({len(key)} characters)"


def time_of(key: str) -> float | None:
    """When a key was made, in seconds since 1970 by the client's clock; None if the key contains no timestamp."""
    if uuid := _UUID7.fullmatch(key):
        return int(uuid[1] + uuid[2], 16) / 1000
    if ulid := _ULID.fullmatch(key):
        milliseconds = 0
        for digit in ulid[1].upper():
            milliseconds = milliseconds * 32 + _DIGITS[digit]
        return milliseconds / 1000
    return None


def is_derived(key: str) -> bool:
    """Whether a key has the form that ``Scope.derive_key`` and ``Scope.key_for`` produce."""
    return _DERIVED.fullmatch(key) is not None
