"""Keys that carry the time at which they were made: UUIDs of version 7 (RFC 9562, section 5.7)."""

from __future__ import annotations

import secrets
import time
from uuid import UUID


def new_key() -> str:
    """Make a key for one logical operation: a version 7 UUID of the current time in milliseconds and 74 random bits.

    Save it before the first attempt, to be able to resume.
    """
    moment = time.time_ns() // 1_000_000
    high, low = secrets.randbits(12), secrets.randbits(62)
    return str(UUID(int=moment << 80 | 7 << 76 | high << 64 | 0b10 << 62 | low))
