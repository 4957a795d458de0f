"""Each test starts with empty counters, in memory and in the table."""

import time
from types import SimpleNamespace

import pytest

from idempotency.contrib.dashboard import counting
from idempotency.contrib.dashboard.counting import counters
from idempotency.contrib.dashboard.models import IdempotencyCounter


@pytest.fixture(autouse=True)
def _nothing_counted(db, monkeypatch):
    # No hour ends during a test, and no flush is due until the test makes it due.
    now = time.time()
    clock = SimpleNamespace(time=lambda: now, monotonic=time.monotonic)
    monkeypatch.setattr(counting, "time", clock)
    monkeypatch.setattr(counting, "FLUSH_EVERY", 3600.0)
    counters.reset()
    IdempotencyCounter.objects.all().delete()  # a worker of an earlier test may have written them as it ended
    yield
    counters.reset()
