"""One arena for all crash tests of a session: a database, providers and a zygote of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.crash.arena import Arena, arena


@pytest.fixture(scope="session")
def shared() -> Iterator[Arena]:
    with arena(os.environ["DATABASE_URL"]) as made:
        yield made
