"""Work that takes longer than its lease, and the renewals that keep the lease."""

from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import pytest
from django.db import connections

from idempotency import REEXECUTE, Operation, claim, require_claim
from idempotency.exceptions import InProgressError
from idempotency.models import IdempotencyRecord
from tests.concurrency.racing import elsewhere
from tests.providers import eventually

#: With the fixture ``often`` the first renewal comes soon. Even on a busy machine, the lease does not end before it.
LEASE = timedelta(minutes=1)
OUTSIDE = {"transaction": False, "recovery": REEXECUTE}


def lease_end(key):
    return IdempotencyRecord.objects.using("default").get(idempotency_key=key).lease_expires_at


def wait_for_a_renewal(key):
    """Wait until the lease has been renewed, or is lost."""
    first_end = lease_end(key)
    assert eventually(lambda: lease_end(key) > first_end or require_claim().lost)


class Work:
    """An operation with an outside effect that takes longer than its lease. Meanwhile its client retries."""

    def __init__(self, name, **policy):
        self.effects = Counter()
        operation = Operation.declare(name, lease=LEASE, heartbeat=60 * LEASE, **policy)
        self._claim = partial(claim, operation, account_id="1")

    def do(self, key, during=nullcontext):
        with self._claim(key=key) as run:
            self.effects[key] += 1
            with during():
                wait_for_a_renewal(key)
                with pytest.raises(InProgressError):
                    elsewhere(partial(self._retry, key))
            run.result = 1

    def _retry(self, key):
        if "pooled" in connections.settings:  # the pool has no free session
            connections["pooled"] = connections["default"].copy(alias="pooled")
        with self._claim(key=key) as run:
            self.effects[key] += 1
            run.result = 2
