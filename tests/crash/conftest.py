"""One world for a session's crash tests, and one behind PgBouncer, each with a database, providers and a zygote."""

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
        pytest.skip(str(error))  # not in `tox -e faults`, which looks before and fails


@pytest.fixture(scope="session")
def pooled(pgbouncer):
    with world(WORKER, os.environ["DATABASE_URL"], pooled=True) as made:
        yield made
