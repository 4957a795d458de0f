"""Brokers for the tests that deliver messages, and metrics that are off."""

import pytest
from django.dispatch import Signal

from idempotency import extensions, signals
from idempotency.contrib.celery import send
from idempotency.contrib.dashboard.counting import counters
from idempotency.contrib.prometheus import exporter
from idempotency.identity.scope import Scope
from idempotency.protocol import faults
from testproject.celery import app
from testproject.harness.redis import running_redis
from tests.contrib.deliveries import Inbox, acts
from tests.harness.servers import skip_without_redis


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    """Start each test with the sample project's Celery app. Clear its acts and faults afterwards."""
    app.set_current()
    yield
    acts.clear()
    faults.disarm()


@pytest.fixture(scope="session")
def redis_server():
    """A Redis server for the test session."""
    skip_without_redis()
    with running_redis("everysec") as server:
        yield server


@pytest.fixture
def inbox(redis_server, monkeypatch):
    """The queues of one test, and Celery connected to their broker."""
    monkeypatch.setenv("CELERY_BROKER_URL", redis_server.url)
    monkeypatch.setattr(app, "_pool", None)  # may be connected to another broker by an earlier test
    monkeypatch.setattr(app.amqp, "_producer_pool", None)
    monkeypatch.setattr(send, "_quiet_until", float("-inf"))  # an earlier test may have had no broker
    app.set_current()
    with app.connection_for_write() as connection:
        connection.default_channel.client.flushall()
        yield Inbox(app, connection)


SIGNALS = [signal for signal in vars(signals).values() if isinstance(signal, Signal)]


@pytest.fixture
def _as_if_off():
    """Start a test with empty counters. Disconnect its metrics and spans afterwards."""
    connected, known = list(exporter._connected), dict(extensions._extensions)
    receivers = [list(signal.receivers) for signal in SIGNALS]
    counters.reset()
    yield
    exporter._connected[:] = connected
    extensions._extensions.clear()
    extensions._extensions.update(known)
    for signal, kept in zip(SIGNALS, receivers, strict=True):
        signal.receivers = kept
        signal.sender_receivers_cache.clear()
    counters.reset()


def happen(event, operation, times=1):
    for _ in range(times):
        signals.send(event, operation, Scope("private-account", operation.name, "private-key"), 1)


@pytest.fixture
def eager(settings):
    """Tasks run where they are published."""
    settings.CELERY_TASK_ALWAYS_EAGER = True
