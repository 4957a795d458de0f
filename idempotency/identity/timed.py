"""Keys that carry the time at which they were made: UUIDs of version 7 (RFC 9562, section 5.7), and ULIDs.

This module imports nothing of Django, because clients use it, too.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Final
from uuid import UUID

# Only the usual spellings. Without its hyphens a UUID would say its version by one digit of 32, and many random keys
# would look like version 7.
_UUID7: Final = re.compile(
    r"([0-9a-f]{8})-([0-9a-f]{4})-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE | re.ASCII
)
_ULID: Final = re.compile(r"([0-7][0-9A-HJKMNP-TV-Z]{9})[0-9A-HJKMNP-TV-Z]{16}", re.IGNORECASE | re.ASCII)

#: The digits of a ULID (Crockford's base 32).
_DIGITS: Final = {digit: value for value, digit in enumerate("0123456789ABCDEFGHJKMNPQRSTVWXYZ")}


def new_key() -> str:
    """Make a key for one logical operation: a version 7 UUID of the current time in milliseconds and 74 random bits.

    Save it before the first attempt, to be able to resume.
    """
    moment = time.time_ns() // 1_000_000
    high, low = secrets.randbits(12), secrets.randbits(62)
    return str(UUID(int=moment << 80 | 7 << 76 | high << 64 | 0b10 << 62 | low))


def time_of(key: str) -> float | None:
    """When a key was made, in seconds since 1970 by the clock of its maker. None if the key doesn't carry its time."""
    if uuid := _UUID7.fullmatch(key):
        return int(uuid[1] + uuid[2], 16) / 1000
    if ulid := _ULID.fullmatch(key):
        milliseconds = 0
        for digit in ulid[1].upper():
            milliseconds = milliseconds * 32 + _DIGITS[digit]
        return milliseconds / 1000
    return None
