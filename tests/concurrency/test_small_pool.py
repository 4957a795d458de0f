"""Renewals where every connection of the pool is taken by the handlers themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections

from idempotency import REEXECUTE, Operation, claim, current_claim
from tests.concurrency.racing import PATIENCE

pytestmark = [pytest.mark.postgres, pytest.mark.failure_75, pytest.mark.django_db(transaction=True)]

BRIEF = timedelta(seconds=0.6)


@pytest.fixture
def pool_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All threads of the process share one connection, and wait for it in vain for as long as a handler has it."""
    pytest.importorskip("psycopg_pool", reason="psycopg is installed without its pool")
    mine = connections["default"]
    pooled = mine.copy()
    pooled.settings_dict["CONN_MAX_AGE"] = 0
    pooled.settings_dict["OPTIONS"]["pool"] = {"min_size": 0, "max_size": 1, "timeout": 0.2}
    monkeypatch.setitem(connections.settings, "default", pooled.settings_dict)  # what other threads connect by
    connections["default"] = pooled
    try:
        yield
    finally:
        pooled.close()
        pooled.close_pool()
        connections["default"] = mine


@pytest.mark.parametrize("transaction", [True, False])
def test_a_handler_renews_though_the_pool_has_no_connection_left(pool_of_one: None, transaction: bool) -> None:
    policy: Any = {} if transaction else {"recovery": REEXECUTE}
    operation = Operation(f"tests.pool.{transaction}", transaction=transaction, **policy)
    with claim(operation, account_id="1", key="k") as run:
        held = current_claim()
        assert held is not None
        if not transaction:
            assert connection.connection is not None
        held.renew()
        run.result = held.attempt
    assert run.result == 1


def test_a_heartbeat_beats_though_the_pool_has_no_connection_left(
    pool_of_one: None, renewals: threading.Semaphore
) -> None:
    with claim("tests.pool.beating", account_id="1", key="k", lease=BRIEF, heartbeat=10 * BRIEF) as run:
        connection.ensure_connection()
        for _ in range(4):  # longer than the lease
            assert renewals.acquire(timeout=PATIENCE)
        run.result = 1
    assert not run.replayed
