"""The worlds of a session's crash tests, directly and behind PgBouncer: a database, providers and a zygote each."""

import os

import pytest

from tests.harness.servers import ProgramMissingError, find_program
from tests.harness.world import world

WORKER = "tests.crash.worker"


@pytest.fixture(scope="session")
def shared():
    with world(WORKER, os.environ["DATABASE_URL"]) as made:
        yield made


@pytest.fixture(scope="session")
def pgbouncer():
    try:
        find_program("pgbouncer", "pgbouncer")
    except ProgramMissingError as error:
        pytest.skip(str(error))  # `tox -e faults` checks for the program first, and fails


@pytest.fixture(scope="session")
def pooled(pgbouncer):
    with world(WORKER, os.environ["DATABASE_URL"], pooled=True) as made:
        yield made
