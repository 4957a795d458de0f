"""What each test of the database begins with, and how the database isolates what it does."""

import pytest

from idempotency.protocol import faults
from tests.database.statements import execute
from tests.outbox import broker, other_broker


@pytest.fixture(autouse=True)
def _empty_brokers_and_no_faults():
    broker.reset()
    other_broker.reset()
    yield
    faults.disarm()


@pytest.fixture
def repeatable_read():
    set_level = "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL "
    execute(set_level + "REPEATABLE READ")
    yield
    execute(set_level + "READ COMMITTED")
