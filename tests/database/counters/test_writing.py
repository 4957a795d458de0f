"""What was counted is added to the table, by one writer at a time, and in no transaction of somebody else's."""

from __future__ import annotations

import asyncio
import threading

import pytest
from django.db import connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from idempotency import signals
from idempotency.models import IdempotencyCounter
from idempotency.upkeep import counters as counters_module
from idempotency.upkeep.counters import counters
from idempotency.upkeep.stats import stats
from tests.database.counters.counting import CLAIMED, SCOPE, count, operation, written

pytestmark = pytest.mark.django_db(transaction=True)

ALIAS = "default"


# Writing


def test_what_was_counted_is_added_to_what_is_there() -> None:
    count(3)
    count(2, signals.replayed)
    counters.flush()
    assert written() == {CLAIMED: 3, (operation.name, "replayed"): 2}
    count(4)
    counters.flush()
    assert written() == {CLAIMED: 7, (operation.name, "replayed"): 2}


def test_what_is_written_and_what_is_not_yet_make_one_number() -> None:
    count(3)
    counters.flush()
    count(2)
    assert written() == {CLAIMED: 3}
    assert stats().claims.value == 5


def test_nothing_new_is_no_statement() -> None:
    count()
    counters.flush()
    with CaptureQueriesContext(connection) as captured:
        counters.flush()
    assert captured.captured_queries == []


def test_an_operation_that_the_process_does_not_know_has_no_name() -> None:
    signals.send(signals.recovered, None, SCOPE, 1, status="completed")
    counters.flush()
    assert written() == {("", "recovered"): 1}


@pytest.mark.postgres
def test_one_statement_writes_any_number_of_counters() -> None:
    count(2)
    count(1, signals.completed)
    with CaptureQueriesContext(connection) as captured:
        counters.flush()
    assert [query["sql"].split()[0] for query in captured.captured_queries] == ["BEGIN", "SELECT", "INSERT", "COMMIT"]


def test_a_connection_is_left_open_or_closed_as_it_was() -> None:
    connection.ensure_connection()
    before = connection.connection
    count()
    counters.flush()
    assert connection.connection is before
    connection.close()
    count()
    counters.flush()
    assert connection.connection is None
    assert written() == {CLAIMED: 2}


def test_no_count_is_lost_between_many_that_write_the_same_counters_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, and for the first time: none of them may be refused, not even once, but by InnoDB."""
    if connection.vendor != "mysql":
        monkeypatch.setattr(counters_module, "MAX_ROUNDS", 1)
    keys = [(f"tests.{number:02}", "claimed") for number in range(20)]
    together = threading.Barrier(4)
    errors: list[Exception] = []

    def add(own: list[tuple[str, str]]) -> None:
        try:
            for _ in range(10):
                together.wait(60)
                counters_module._add(ALIAS, dict.fromkeys(own, 1))
        except Exception as error:  # noqa: BLE001 - a thread's error is looked at below
            errors.append(error)
            together.abort()
        finally:
            connections.close_all()

    threads = [threading.Thread(target=add, args=(keys if number % 2 else keys[::-1],)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert written() == dict.fromkeys(keys, 40)


def test_a_counter_says_what_it_counts() -> None:
    assert str(IdempotencyCounter(operation="charges.create", event="claimed", total=3)) == "charges.create claimed: 3"


# Not writing


def test_a_flush_in_an_open_transaction_does_nothing() -> None:
    count()
    with transaction.atomic(), CaptureQueriesContext(connection) as captured:
        counters.flush()
    assert captured.captured_queries == []
    counters.flush()
    assert written() == {CLAIMED: 1}


def test_a_flush_in_a_transaction_that_has_lost_its_connection_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    count()
    with transaction.atomic():
        connection.close()
        counters.flush()
    assert caplog.records == []
    counters.flush()
    assert written() == {CLAIMED: 1}


def test_a_flush_in_a_transaction_without_atomic_does_nothing() -> None:
    count()
    connection.set_autocommit(False)
    try:
        counters.flush()
        connection.rollback()
    finally:
        connection.set_autocommit(True)
    assert written() == {}
    counters.flush()
    assert written() == {CLAIMED: 1}


def test_a_flush_in_the_thread_of_an_event_loop_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    count()

    async def flush() -> None:
        counters.flush()

    asyncio.run(flush())
    assert written() == {}
    assert caplog.records == []
    counters.flush()
    assert written() == {CLAIMED: 1}


def test_only_one_thread_flushes_at_a_time() -> None:
    count()
    with counters._flushing:
        counters.flush()
    assert written() == {}


def test_a_reader_does_not_wait_for_a_flush_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters_module, "READ_PATIENCE", 0.01)
    count(2)
    with counters._flushing:
        assert stats().claims.value == 2


def test_what_is_not_written_yet_belongs_to_the_database_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    count(2)
    assert counters.read(ALIAS) == {operation.name: {"claimed": 2}}
    monkeypatch.setattr(counters_module, "alias", lambda: "elsewhere")
    assert counters.read(ALIAS) == {}


def test_what_was_counted_in_a_test_database_is_not_written_to_the_one_that_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when a test runner has ended, and then the interpreter does."""
    count()
    with monkeypatch.context() as patch, CaptureQueriesContext(connection) as captured:
        patch.setitem(connection.settings_dict, "NAME", "nowhere")
        counters.flush()
    assert captured.captured_queries == []
    counters.flush()
    assert written() == {}
    count()
    counters.flush()
    assert written() == {CLAIMED: 1}
