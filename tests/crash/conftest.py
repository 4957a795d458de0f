"""One arena for all crash tests of a session: a database, providers and a zygote of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.crash.arena import Arena, arena


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "crash: breaks real processes on purpose; takes its time")


@pytest.fixture(scope="session")
def shared() -> Iterator[Arena]:
    with arena(os.environ["DATABASE_URL"]) as made:
        yield made
