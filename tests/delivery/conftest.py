"""One stage for all delivery tests of a session, with its own broker, database, providers and zygote."""

import os

import pytest

from tests.delivery.stage import BROKERS, stage
from tests.harness.servers import skip_without_redis

#: The test environment contains Redis. An environment with RabbitMQ selects that instead.
BROKER = os.environ.get("DELIVERY_BROKER", "redis")


@pytest.fixture(scope="session")
def shared():
    assert BROKER in BROKERS, f"DELIVERY_BROKER must be one of {list(BROKERS)}, not {BROKER!r}"
    if BROKER == "redis":
        skip_without_redis()
    with stage(BROKER, os.environ["DATABASE_URL"]) as made:
        yield made
