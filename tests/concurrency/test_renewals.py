"""Renewals while one database server is silent, and while a pool has no free connection."""

import os
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from django.db import connection

from idempotency import claim, require_claim
from idempotency.exceptions import UnavailableError
from idempotency.store import own_connection
from idempotency.store.own_connection import LIMIT
from tests.aliases import another_alias, pool_of_one
from tests.concurrency.racing import PATIENCE, elsewhere
from tests.concurrency.renewing import OUTSIDE, Work, wait_for_a_renewal
from tests.harness.proxy import Proxy
from tests.providers import eventually

pytestmark = [pytest.mark.except_sqlite, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def silent(transactional_db, monkeypatch):
    """Records of operations named ``silent.…`` are reached over this proxy."""
    with Proxy(os.environ["DATABASE_URL"]) as proxy, another_alias(monkeypatch, "silent", proxy.url):
        yield proxy


@contextmanager
def silence(proxy):
    """In the block, clients receive nothing from the server."""
    proxy.holding = True
    try:
        yield
    finally:
        proxy.holding = False


@pytest.mark.failure_78
def test_a_silent_database_costs_no_lease_in_another_database(silent, often):
    work = Work("tests.beside_silence", **OUTSIDE)
    with claim("silent.one", account_id="1", key="k", heartbeat=timedelta(minutes=5)) as run:
        wait_for_a_renewal("k")
        with silence(silent):
            elsewhere(partial(work.do, "healthy"))
        run.result = 1
    assert work.effects == {"healthy": 1}


def is_renewed(held):
    """Whether the server has answered within the limit, which may be too short on a busy machine."""
    try:
        held.renew()
    except UnavailableError:
        return False
    return True


@pytest.mark.failure_78
@pytest.mark.parametrize("since", ["before the connection", "before the statement"])
def test_leases_are_renewed_again_once_a_silent_server_answers(silent, since, monkeypatch):
    """The server never answers a statement that it left unanswered."""
    monkeypatch.setattr(own_connection, "LIMIT", 1)
    looks = Mock(side_effect=time.monotonic)
    monkeypatch.setattr(own_connection, "time", SimpleNamespace(monotonic=looks))
    # The heartbeat keeps the renewer and its session.
    with claim("silent.two", account_id="1", key="k", heartbeat=timedelta(minutes=5)) as run:
        held = require_claim()
        if since == "before the statement":
            assert eventually(partial(is_renewed, held))
        looks.reset_mock()
        with silence(silent), pytest.raises(UnavailableError):
            held.renew()
        assert looks.call_count < 100  # it does not poll without pauses
        assert eventually(partial(is_renewed, held))
        run.result = 1


def test_a_statement_times_out_once_the_server_is_silent_for_the_limit(monkeypatch):
    clock = Mock(return_value=7)
    monkeypatch.setattr(own_connection, "time", SimpleNamespace(monotonic=clock))

    def work():
        return [(yield "to read"), (yield "to write"), (yield "to read again")]

    def resume(waiting, ready, after):
        clock.return_value = 7 + after
        return waiting.send(ready)

    waiting = own_connection._in_time(work())
    assert resume(waiting, None, 0) == "to read"
    assert resume(waiting, 0, LIMIT - 1) == "to write"
    assert resume(waiting, "ready", LIMIT + 1) == "to read again"
    with pytest.raises(StopIteration) as end:
        resume(waiting, "ready", LIMIT + 2)
    assert end.value.value == [0, "ready", "ready"]
    late = own_connection._in_time(work())
    resume(late, None, 0)
    with pytest.raises(TimeoutError):
        resume(late, 0, LIMIT)


@pytest.fixture
def full_pool():
    """A pool of one session, for which other threads wait in vain while a handler holds it."""
    with pool_of_one(timeout=PATIENCE):
        yield


@pytest.mark.postgres
@pytest.mark.failure_75
@pytest.mark.parametrize("policy", [{}, OUTSIDE], ids=["True", "False"])
def test_a_handler_renews_though_the_pool_has_no_connection_left(full_pool, policy):
    with claim(f"tests.pool.{bool(policy)}", account_id="1", key="k", **policy) as run:
        held = require_claim()
        if policy:
            assert connection.connection is not None
        held.renew()
        run.result = held.attempt
    assert run.result == 1


@pytest.mark.postgres
@pytest.mark.failure_75
def test_a_heartbeat_beats_though_the_pool_has_no_connection_left(full_pool, often):
    with claim("tests.pool.beating", account_id="1", key="k", heartbeat=timedelta(minutes=5)) as run:
        wait_for_a_renewal("k")
        assert not require_claim().lost
        run.result = 1
    assert not run.replayed
