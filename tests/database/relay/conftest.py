"""Each test begins with brokers that have received nothing, and no fault is left armed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from idempotency.protocol import faults
from tests.outbox import broker, other_broker


@pytest.fixture(autouse=True)
def _empty_brokers() -> Iterator[None]:
    broker.reset()
    other_broker.reset()
    yield
    faults.armed.clear()
