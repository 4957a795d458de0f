"""One arena for all crash tests of a session, and one behind PgBouncer: a database, providers and a zygote each."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.crash.arena import Arena, arena
from tests.harness.servers import ProgramMissingError, find_program


@pytest.fixture(scope="session")
def shared() -> Iterator[Arena]:
    with arena(os.environ["DATABASE_URL"]) as made:
        yield made


@pytest.fixture(scope="session")
def pgbouncer() -> None:
    try:
        find_program("pgbouncer", "pgbouncer")
    except ProgramMissingError as error:
        pytest.skip(str(error))  # `tox -e faults` has looked before, so that it can't be left out there


@pytest.fixture(scope="session")
def pooled(pgbouncer: None) -> Iterator[Arena]:
    with arena(os.environ["DATABASE_URL"], pooled=True) as made:
        yield made
