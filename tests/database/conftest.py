"""Fixtures for every database test."""

import pytest

from idempotency.protocol import faults
from tests.outbox import broker, other_broker


@pytest.fixture(autouse=True)
def _empty_brokers_and_no_faults():
    broker.reset()
    other_broker.reset()
    yield
    faults.disarm()
