"""One stage for all delivery tests of a session, with its own broker, database, providers and zygote."""

import os

import pytest

from tests.delivery.stage import BROKERS, stage
from tests.harness.servers import skip_without_redis

#: Redis comes with the test environment. An environment with RabbitMQ installed requests it.
BROKER = os.environ.get("DELIVERY_BROKER", "redis")


@pytest.fixture(scope="session")
def shared():
    assert BROKER in BROKERS, f"DELIVERY_BROKER is one of {list(BROKERS)}, and not {BROKER!r}"
    if BROKER == "redis":
        skip_without_redis()
    with stage(BROKER, os.environ["DATABASE_URL"]) as made:
        yield made
