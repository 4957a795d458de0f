"""The purge on PostgreSQL, beside transactions that hold its records or the whole table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import pytest
from django.db import OperationalError, connection, connections, transaction

from idempotency import REEXECUTE, Operation
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.operate import batches
from idempotency.operate.batches import BatchResult
from idempotency.operate.purge import purge_batches, purge_once
from idempotency.operate.sweep import recover_batches
from idempotency.outbox.relay import relay_batches
from idempotency.protocol.ownership import Ownership
from idempotency.store import Store, store_for
from idempotency.store.postgresql import PostgreSQLStore
from tests.concurrency.racing import PATIENCE, elsewhere, race
from tests.database.claiming import PAYLOAD, acquire
from tests.database.statements import before_statement, execute
from tests.outbox import broker, make_messages
from tests.records import HOUR, make_records, remaining

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]


def test_a_refusal_of_the_server_ends_the_purge() -> None:
    kept = make_records(3)
    with (
        before_statement("DELETE FROM", lambda: execute("SELECT pg_cancel_backend(pg_backend_pid())")),
        pytest.raises(OperationalError, match="canceling statement"),
    ):
        purge_once()
    assert remaining() == {*kept}


def test_a_lock_of_the_whole_table_is_waited_for() -> None:
    """As when an index is built. The batch has locked nothing meanwhile."""
    make_records(3)
    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            execute("LOCK TABLE idempotency_record IN SHARE MODE")
            batch = pool.submit(elsewhere, purge_once)
            _wait_until_blocked(r"^\s*WITH due")
        assert batch.result(PATIENCE).deleted == 3


def _wait_until_blocked(statement: str) -> None:
    """Wait until a statement of this pattern waits for this transaction."""
    give_up = time.monotonic() + PATIENCE
    with connection.cursor() as cursor:
        while time.monotonic() < give_up:
            execute("SELECT pg_stat_clear_snapshot()")  # else a transaction sees the same activity again
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE pg_backend_pid() = ANY(pg_blocking_pids(pid)) AND query ~ %s",
                [statement],
            )
            if cursor.fetchone() != (0,):
                return
    pytest.fail("Nobody waits for this transaction.")


@pytest.mark.failure_30
@pytest.mark.parametrize("vendor", [PostgreSQLStore, Store], ids=["postgresql", "portable"])
def test_a_record_that_is_locked_is_passed_over(vendor: type[Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that starts the record over has its row. MySQL and MariaDB run the portable statement, as here."""
    claimed, *_ = make_records(3)
    monkeypatch.setattr(batches, "store_for", lambda using: vendor(connections[using]))
    with transaction.atomic():
        IdempotencyRecord.objects.filter(pk=claimed).update(status=Status.IN_PROGRESS)
        batches_taken = elsewhere(lambda: [*purge_batches()])
    assert [(batch.deleted, batch.exhausted) for batch in batches_taken] == [(2, True)]
    assert remaining() == {claimed}


swept = Operation("tests.purge.swept", recovery=REEXECUTE)
claimed_meanwhile = Operation("tests.purge.claimed")


@pytest.fixture
def stricter(request: pytest.FixtureRequest) -> Iterator[None]:
    from psycopg import IsolationLevel

    connection.close()
    with pytest.MonkeyPatch.context() as patched, closing(connection):
        patched.setitem(connection.settings_dict["OPTIONS"], "isolation_level", IsolationLevel[request.param])
        yield


@pytest.mark.failure_16
@pytest.mark.failure_30
@pytest.mark.parametrize("stricter", ["READ_COMMITTED", "REPEATABLE_READ", "SERIALIZABLE"], indirect=True)
@pytest.mark.usefixtures("stricter")
def test_purges_sweeps_relays_and_claims_at_once_end_and_no_claim_is_lost() -> None:
    broker.reset()
    make_records(300)
    live = make_records(20, Status.IN_PROGRESS, lease=HOUR, expires=-HOUR)
    abandoned = make_records(60, Status.IN_PROGRESS, lease=-HOUR, expires=HOUR, operation=swept.name)
    make_messages(60)
    keys = [f"again-{number}" for number in range(40)]
    for key in keys:
        make_records(1, operation=claimed_meanwhile.name, idempotency_key=key, request_hash=PAYLOAD.request_hash)

    def again_and_again(take: Callable[[], Iterator[BatchResult]]) -> None:
        """Until nothing is due. The database may refuse a batch because of the others."""
        while True:
            try:
                for _ in take():
                    pass
                return
            except OperationalError as error:
                if not store_for("default").is_busy(error):
                    raise

    def claim_all(claimed: list[int]) -> None:
        for key in keys:
            owned = acquire(claimed_meanwhile, key)
            assert isinstance(owned, Ownership)
            claimed.append(owned.fence.id)

    kinds: list[Callable[[], Iterator[BatchResult]]] = [
        lambda: purge_batches(batch_size=7),
        lambda: recover_batches(batch_size=5),
        lambda: relay_batches(batch_size=5),
    ]
    claimed: list[int] = []
    race([partial(claim_all, claimed), *(partial(again_and_again, kind) for kind in kinds * 2)])
    again_and_again(kinds[0])
    assert len(claimed) == len(keys)
    assert remaining() == {*live, *abandoned, *claimed}
    assert {*IdempotencyRecord.objects.in_progress().values_list("pk", flat=True)} == {*live, *claimed}
    assert len(broker.payloads) == 60
