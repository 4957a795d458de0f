"""Brokers for the tests that deliver messages, and a server for those that call one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.dispatch import Signal

from idempotency import Operation, signals
from idempotency.contrib.celery import send
from idempotency.contrib.dashboard.counters import counters
from idempotency.contrib.prometheus import exporter
from idempotency.identity.scope import Scope
from idempotency.outbox.publishing import header_sources
from idempotency.outbox.relay import sending_contexts
from idempotency.protocol import faults
from testproject.celery import app
from testproject.harness.redis import Redis, running_redis
from tests.contrib.deliveries import Inbox, acts
from tests.contrib.senders import SENDERS, Sender
from tests.contrib.servers import Server, serving
from tests.harness.servers import skip_without_redis


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """A test begins with the sample project's Celery, and leaves no act and no fault."""
    app.set_current()
    yield
    acts.clear()
    faults.disarm()


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


SIGNALS = [signal for signal in vars(signals).values() if isinstance(signal, Signal)]
LISTS: list[list[Any]] = [header_sources, sending_contexts, exporter._connected]


@pytest.fixture
def _as_if_off() -> Iterator[None]:
    """The metrics and spans that a test switches on are off again afterwards, and it begins with nothing counted."""
    lists = [list(one) for one in LISTS]
    receivers = [list(signal.receivers) for signal in SIGNALS]
    counters.reset()
    yield
    for one, before in zip(LISTS, lists, strict=True):
        one[:] = before
    for signal, kept in zip(SIGNALS, receivers, strict=True):
        signal.receivers = kept
        signal.sender_receivers_cache.clear()
    counters.reset()


def happen(event: Signal, operation: Operation, times: int = 1) -> None:
    for _ in range(times):
        signals.send(event, operation, Scope("private-account", operation.name, "private-key"), 1)


@pytest.fixture
def eager(settings: Any) -> None:
    """Tasks run where they are published."""
    settings.CELERY_TASK_ALWAYS_EAGER = True


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture(params=SENDERS)
def sender(request: pytest.FixtureRequest) -> Sender:
    return SENDERS[request.param]()


@pytest.fixture
def waits() -> list[float]:
    """What a client would have slept."""
    return []
