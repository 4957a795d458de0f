"""The purge on PostgreSQL, beside transactions that hold its records or the whole table."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import OperationalError, connection, connections, transaction

from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.sql import Store
from idempotency.sql.portable import PortableStore
from idempotency.sql.postgresql import PostgreSQLStore
from idempotency.upkeep import retention
from idempotency.upkeep.retention import purge_batches, purge_once
from tests.concurrency.racing import PATIENCE, elsewhere
from tests.database.statements import before_statement, execute
from tests.records import make_records, remaining

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]


@pytest.mark.failure_mode(30)
@pytest.mark.whole_table
def test_a_batch_that_holds_rows_does_not_wait_long_for_another_one() -> None:
    make_records(1)
    bounds: list[str] = []

    def ask() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SHOW lock_timeout")
            bounds.append(cursor.fetchone()[0])

    with before_statement("DELETE FROM idempotency_record", ask):
        purge_once()
    assert bounds == ["100ms"]


def test_what_else_the_server_refuses_ends_the_purge() -> None:
    kept = make_records(3)
    with (
        before_statement("DELETE FROM", lambda: execute("SELECT pg_cancel_backend(pg_backend_pid())")),
        pytest.raises(OperationalError, match="canceling statement"),
    ):
        purge_once()
    assert remaining() == {*kept}


@pytest.mark.failure_mode(30)
@pytest.mark.whole_table
def test_a_record_that_is_claimed_anew_while_a_batch_waits_for_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    claimed, *_ = make_records(3)
    monkeypatch.setattr(retention, "LOCK_TIMEOUT", timedelta(seconds=PATIENCE))
    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            IdempotencyRecord.objects.filter(pk=claimed).update(status=Status.IN_PROGRESS)
            batch = pool.submit(elsewhere, purge_once)
            _wait_until_blocked(r"^\s*(DELETE|WITH deleted)")
        assert batch.result(PATIENCE).deleted == 2
    assert remaining() == {claimed}


@pytest.mark.whole_table
def test_a_lock_of_the_whole_table_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when an index is built. Nobody waits for rows of this batch meanwhile."""
    make_records(3)
    monkeypatch.setattr(retention, "LOCK_TIMEOUT", timedelta(milliseconds=1))
    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            execute("LOCK TABLE idempotency_record IN SHARE MODE")
            batch = pool.submit(elsewhere, purge_once)
            _wait_until_blocked(r"^\s*WITH due")
        assert batch.result(PATIENCE).deleted == 3


def _wait_until_blocked(statement: str) -> None:
    """Wait until a statement of this pattern has waited for this transaction for longer than the least bound."""
    give_up = time.monotonic() + PATIENCE
    with connection.cursor() as cursor:
        while time.monotonic() < give_up:
            execute("SELECT pg_stat_clear_snapshot()")  # else a transaction sees the same activity again
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE pg_backend_pid() = ANY(pg_blocking_pids(pid)) AND query ~ %s"
                " AND query_start < clock_timestamp() - interval '20 ms'",
                [statement],
            )
            if cursor.fetchone() != (0,):
                return
    pytest.fail("Nobody waits for this transaction.")


@pytest.mark.failure_mode(30)
@pytest.mark.parametrize("store", [PostgreSQLStore, PortableStore], ids=["postgresql", "portable"])
def test_a_record_that_is_locked_is_passed_over(store: type[Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that starts the record over has its row. MySQL and MariaDB run the portable statement, as here."""
    claimed, *_ = make_records(3)
    monkeypatch.setattr(retention.sql, "store", lambda using: store(connections[using]))
    with transaction.atomic():
        IdempotencyRecord.objects.filter(pk=claimed).update(status=Status.IN_PROGRESS)
        batches = elsewhere(lambda: [*purge_batches()])
    assert [(batch.deleted, batch.exhausted) for batch in batches] == [(2, True)]
    assert remaining() == {claimed}
