"""What tests of metrics, spans and log lines share: all that they connect is disconnected again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.dispatch import Signal

from idempotency import Operation, signals
from idempotency.contrib.dashboard.counters import counters
from idempotency.contrib.prometheus import exporter
from idempotency.identity.scope import Scope
from idempotency.outbox.publishing import header_sources
from idempotency.outbox.relay import sending_contexts

SIGNALS = [signal for signal in vars(signals).values() if isinstance(signal, Signal)]
LISTS: list[list[Any]] = [header_sources, sending_contexts, exporter._connected]


@pytest.fixture
def _as_if_off() -> Iterator[None]:
    """What a test switches on is off again afterwards, and it begins with nothing counted."""
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
