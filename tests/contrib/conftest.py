"""Brokers for the tests that deliver messages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from idempotency.operation import registry
from testproject.celery import app
from tests.contrib.brokers import BrokerMissingError, RedisServer
from tests.contrib.deliveries import Inbox


@pytest.fixture(autouse=True)
def _forget_operations() -> Iterator[None]:
    """Forget what a test declares, so that another may use the name with another policy."""
    before = {operation.name for operation in registry}
    yield
    for operation in registry:
        if operation.name.startswith("tests.") and operation.name not in before:
            registry.discard(operation.name)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis of the session's own."""
    try:
        RedisServer.program()
    except BrokerMissingError as error:
        if sys.version_info < (3, 13):
            raise
        pytest.skip(str(error))  # the wheel with a server ends at 3.12; the message says what to install
    directory: Path = tmp_path_factory.mktemp("redis")
    with RedisServer(directory) as server:
        yield server


@pytest.fixture
def inbox(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inbox]:
    """The queues of one test, and Celery connected to their broker."""
    monkeypatch.setenv("CELERY_BROKER_URL", redis_server.url)
    monkeypatch.setattr(app, "_pool", None)  # connected elsewhere, if a test before this one has published anything
    monkeypatch.setattr(app.amqp, "_producer_pool", None)
    app.set_current()
    with app.connection_for_write() as connection:
        connection.default_channel.client.flushall()
        yield Inbox(app, connection)
