"""A database that refuses to write loses no count, and nobody waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
from django.db import OperationalError, connection, connections, transaction

from idempotency.models import IdempotencyCounter
from idempotency.upkeep import counters as counters_module
from idempotency.upkeep.counters import counters
from idempotency.upkeep.stats import stats
from tests.database.counters.counting import CLAIMED, count, refusing, unreachable, written

pytestmark = pytest.mark.django_db(transaction=True)


def deadlock() -> OperationalError:
    """As the driver of PostgreSQL gives it or, on the others, as that of MySQL does."""
    if connection.vendor != "postgresql":
        return OperationalError(1213, "Deadlock found")
    from psycopg import errors

    error = OperationalError("deadlock detected")
    error.__cause__ = errors.lookup("40P01")("deadlock detected")
    return error


def test_a_database_that_refuses_loses_nothing_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
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
    assert len(caplog.records) == 2  # it is news again
    assert stats().claims.value == 4


def test_an_interrupted_flush_loses_nothing() -> None:
    count()
    with refusing(KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        counters.flush()
    count()
    counters.flush()
    assert written() == {CLAIMED: 2}


@pytest.mark.parametrize(
    "error", [deadlock, lambda: RuntimeError("a driver's")], ids=["deadlocks", "no database error"]
)
def test_no_failure_is_raised_or_loses_a_count(error: Callable[[], Exception]) -> None:
    count()
    with refusing(error):
        counters.flush()
    assert written() == {}
    counters.flush()
    assert written() == {CLAIMED: 1}


def test_a_deadlock_is_tried_again_at_once(caplog: pytest.LogCaptureFixture) -> None:
    count()
    with refusing(deadlock, counters_module.MAX_ROUNDS - 1):
        counters.flush()
    assert written() == {CLAIMED: 1}
    assert caplog.records == []


@pytest.mark.postgres
def test_a_lock_that_a_frozen_process_holds_is_not_waited_for_without_bound() -> None:
    count()
    counters.flush()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic():
            IdempotencyCounter.objects.update(total=0)
            held.set()
            done.wait(60)
            transaction.set_rollback(True)
        connections.close_all()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(60)
        count()
        counters.flush()
        assert not done.is_set()
    finally:
        done.set()
        thread.join()
    assert written() == {CLAIMED: 1}
    counters.flush()
    assert written() == {CLAIMED: 2}
