"""Brokers for the tests that deliver messages, and a server for those that call one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from idempotency.contrib.celery import send
from idempotency.protocol import faults
from testproject.celery import app
from testproject.harness.redis import Redis, running_redis
from tests.contrib.deliveries import Inbox
from tests.contrib.servers import Server, serving
from tests.harness.redis import skip_without_redis
from tests.operations import forgetting_operations


@pytest.fixture(autouse=True)
def _forget_operations() -> Iterator[None]:
    """Forget what a test declares, so that another may use the name with another policy."""
    with forgetting_operations("tests."):
        yield


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Redis]:
    """A Redis of the session's own."""
    skip_without_redis()
    with running_redis("everysec") as server:
        yield server


@pytest.fixture
def inbox(redis_server: Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inbox]:
    """The queues of one test, and Celery connected to their broker."""
    monkeypatch.setenv("CELERY_BROKER_URL", redis_server.url)
    monkeypatch.setattr(app, "_pool", None)  # connected elsewhere, if a test before this one has published anything
    monkeypatch.setattr(app.amqp, "_producer_pool", None)
    monkeypatch.setattr(send, "_quiet_until", float("-inf"))  # and if that one had no broker
    app.set_current()
    with app.connection_for_write() as connection:
        connection.default_channel.client.flushall()
        yield Inbox(app, connection)


@pytest.fixture
def nothing_arranged() -> Iterator[None]:
    """Nothing of what a test arranges for its tasks' runs is left to the next test."""
    from tests.contrib.consumers import acts  # declares tasks and operations, which other tests are to be without

    yield
    acts.clear()
    faults.armed.clear()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running
