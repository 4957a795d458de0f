"""Counts are added to the table outside open transactions, across threads, forks and processes."""

import asyncio
import logging
import os
import signal
import sys
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import pytest
from django.db import OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext

from idempotency import signals
from idempotency.contrib.dashboard import counting as counters_module
from idempotency.contrib.dashboard.counting import counters, this_hour
from idempotency.contrib.dashboard.models import IdempotencyCounter
from idempotency.operate import batches
from idempotency.store import store_for
from tests.concurrency.failures import server_error
from tests.concurrency.racing import PATIENCE, Gate, held, race
from tests.database import processes
from tests.database.counters.counting import CLAIMED, count, operation, refusing, unreachable, written

pytestmark = pytest.mark.django_db(transaction=True)

ALIAS = "default"


def test_new_counts_are_added_to_the_stored_ones():
    count(3)
    count(2, signals.replayed)
    counters.flush()
    assert written() == {CLAIMED: 3, (operation.name, "replayed"): 2}
    count(4)
    counters.flush()
    assert written() == {CLAIMED: 7, (operation.name, "replayed"): 2}
    with CaptureQueriesContext(connection) as captured:
        counters.flush()
    assert captured.captured_queries == [], "nothing is written without new counts"


def test_a_connection_is_left_open_or_closed_as_it_was():
    for prepare in (connection.ensure_connection, connection.close):
        prepare()
        before = connection.connection
        count()
        counters.flush()
        assert connection.connection is before
    assert written() == {CLAIMED: 2}


def test_no_count_is_lost_between_concurrent_writers(monkeypatch):
    """The writers insert the same rows in different orders. Only InnoDB may refuse one at first."""
    if connection.vendor != "mysql":
        monkeypatch.setattr(batches, "MAX_ROUNDS", 1)
    # On a busy machine, the last of four writers waits longer on Citus, which changes a copy on each server.
    monkeypatch.setattr(counters_module, "STATEMENT_TIMEOUT", timedelta(seconds=PATIENCE))
    keys = [(f"tests.{number:02}", "claimed") for number in range(20)]
    for _ in range(3):
        counts = [dict.fromkeys(own, 1) for own in (keys, keys[::-1]) * 2]
        race([lambda one=one: counters_module.write_counts(ALIAS, one, this_hour()) for one in counts])
    assert written() == dict.fromkeys(keys, 12)


def test_a_counter_describes_what_it_counts():
    assert str(IdempotencyCounter(operation="charges.create", event="claimed", total=3)) == "charges.create claimed: 3"


@contextmanager
def lost_connection():
    with transaction.atomic():
        connection.close()
        yield


@contextmanager
def no_autocommit():
    connection.set_autocommit(False)
    try:
        yield
        connection.rollback()
    finally:
        connection.set_autocommit(True)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(transaction.atomic, id="an open transaction"),
        pytest.param(lost_connection, id="a transaction that has lost its connection"),
        pytest.param(no_autocommit, id="a transaction without atomic"),
        pytest.param(lambda: counters._flushing, id="during another thread's flush"),
    ],
)
def test_a_flush_does_nothing_in_a_transaction_or_during_another_flush(place, caplog):
    count()
    with place():
        counters.flush()
        assert counters._pending == {CLAIMED: 1}
    assert caplog.records == []
    counters.flush()
    assert written() == {CLAIMED: 1}


def test_a_flush_in_the_thread_of_an_event_loop_does_nothing():
    async def flush():
        counters.flush()

    count()
    asyncio.run(flush())
    assert counters._pending == {CLAIMED: 1}


def test_counts_of_a_test_database_are_not_written_to_its_successor(monkeypatch):
    """This happens when the interpreter exits after the test runner has ended."""
    count()
    with monkeypatch.context() as patch, CaptureQueriesContext(connection) as captured:
        patch.setitem(connection.settings_dict, "NAME", "nowhere")
        counters.flush()
    assert captured.captured_queries == []
    for expected in ({}, {CLAIMED: 1}):
        counters.flush()
        assert written() == expected
        count()


# A refused write loses no count and delays no request


def deadlock():
    """A deadlock error of PostgreSQL's driver, or of MariaDB's on other databases."""
    return server_error("40P01") if connection.vendor == "postgresql" else OperationalError(1213, "Deadlock found")


def test_a_refused_write_loses_no_count_and_is_logged_once(caplog):
    count(2)
    with refusing(unreachable):
        counters.flush()
        count()
        counters.flush()
        assert [(record.name, record.levelno) for record in caplog.records] == [("idempotency", logging.WARNING)]
    assert written() == {}
    counters.flush()
    assert written() == {CLAIMED: 3}
    count()
    with refusing(unreachable):
        counters.flush()
    assert len(caplog.records) == 2  # logged again after a success
    assert counters._pending == {CLAIMED: 1}


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        pytest.param(deadlock, nullcontext(), id="deadlocks"),
        pytest.param(lambda: RuntimeError("a driver's"), nullcontext(), id="not a database error"),
        pytest.param(KeyboardInterrupt, pytest.raises(KeyboardInterrupt), id="an interrupt"),
    ],
)
def test_a_failure_loses_no_count_and_only_an_interrupt_is_raised(error, raised):
    count()
    with refusing(error), raised:
        counters.flush()
    assert written() == {}
    count()
    counters.flush()
    assert written() == {CLAIMED: 2}


def test_a_deadlock_is_retried_at_once(caplog, monkeypatch):
    if connection.vendor == "sqlite":  # it has no deadlocks, so treat every error as a lost race
        monkeypatch.setattr(store_for(connection.alias), "lost_a_race", lambda error: True)
    count()
    with refusing(deadlock, batches.MAX_ROUNDS - 1):
        counters.flush()
    assert written() == {CLAIMED: 1}
    assert caplog.records == []


@pytest.mark.postgres
def test_the_wait_for_the_lock_of_a_frozen_process_is_bounded():
    count()
    counters.flush()
    gate = Gate()

    def hold():
        with transaction.atomic():
            IdempotencyCounter.objects.update(total=0)
            gate.pass_through()
            transaction.set_rollback(True)

    with held(hold, gate):
        count()
        counters.flush()
    assert written() == {CLAIMED: 1}
    counters.flush()
    assert written() == {CLAIMED: 2}


# Counts add up over threads, forks and processes


def test_no_count_is_lost_or_written_twice_between_threads():
    def work():
        for _ in range(20):
            for _ in range(250):
                counters.count(operation.name, "claimed")
            counters.flush()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # switch between threads as often as possible
    try:
        race([work] * 8)
    finally:
        sys.setswitchinterval(before)
    counters.flush()
    assert written() == {CLAIMED: 40_000}


def test_a_forked_child_starts_with_no_counts():
    count()
    with counters._lock, counters._flushing:  # as other threads may hold them at that moment
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            count(2)
            os._exit(counters._pending[CLAIMED])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    assert counters._pending == {CLAIMED: 1}


PROCESS = """
import os, sys, django
django.setup()
from tests.database.counters.counting import count

"""


@pytest.mark.once
def test_a_process_that_ends_without_its_database_warns_once():
    process = processes.start(PROCESS + "count(2)", env={"DATABASE_URL": "postgres://missing@/nothing?host=/nowhere"})
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors.count("The counters could not be written") == 1
