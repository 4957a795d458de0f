"""Each test begins with nothing counted, in memory or in the table."""

import pytest

from idempotency.contrib.dashboard.counting import counters
from idempotency.contrib.dashboard.models import IdempotencyCounter


@pytest.fixture(autouse=True)
def _nothing_counted(db):
    counters.reset()
    IdempotencyCounter.objects.all().delete()  # which a worker of an earlier test may have written as it ended
    yield
    counters.reset()
