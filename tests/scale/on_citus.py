"""What holds on Citus. ``python -m tests.scale.citus … checks`` runs this file, and nothing else collects it."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction

from idempotency import REEXECUTE, Operation, claim, current_claim, signals, sql
from idempotency.checks import check_databases
from idempotency.identity.scope import Scope
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.outbox import publish
from idempotency.outbox.relay import relay_batches
from idempotency.sql import Fence, Row
from idempotency.upkeep.retention import purge_batches, purge_once
from idempotency.upkeep.stats import stats
from idempotency.upkeep.sweep import recover_batches
from tests.concurrency.racing import Gate, held, race
from tests.database.claiming import OUTCOME
from tests.harness.zygote import wait_until
from tests.outbox import SENDER, broker
from tests.records import HOUR, make_records, remaining

pytestmark = pytest.mark.django_db(transaction=True)

HASH = "v1:" + "0" * 64
LEASE, TTL = timedelta(minutes=1), timedelta(hours=1)
OVER = timedelta(seconds=-1)

swept = Operation("scale.swept", recovery=REEXECUTE)
stepped = Operation("scale.stepped", transaction=False, recovery=REEXECUTE)


def tasks_of(call: Callable[[], object]) -> list[tuple[str, int]]:
    """How many tasks Citus makes of each statement of ``call`` on records and steps."""
    found: list[tuple[str, int]] = []

    def explain(execute: Any, statement: str, parameters: Any, many: bool, context: Any) -> Any:
        alone = statement.rpartition("END $$; ")[2]
        if re.search("idempotency_(record|step)", alone):
            with connection.cursor() as cursor:
                cursor.cursor.execute(f"EXPLAIN {alone}", parameters)
                plan = "\n".join(line for (line,) in cursor.fetchall())
            assert "Distributed Subplan" not in plan
            found.append((alone.split()[0], sum(map(int, re.findall(r"Task Count: (\d+)", plan)))))
        return execute(statement, parameters, many, context)

    with connection.execute_wrapper(explain):
        call()
    return found


def test_each_statement_of_a_request_is_one_task() -> None:
    store, scope = sql.store("default"), Scope("acme", "scale.tasks", "key")

    def observed() -> Row:
        row = store.read(scope)
        assert row is not None
        return row

    def fence() -> Fence:
        row = observed()
        return Fence(scope, row.id, row.attempt, row.request_hash)

    def every_change() -> None:
        with transaction.atomic():
            assert store.insert_claim(scope, HASH, lease=OVER, ttl=TTL, wait_for_disk=False)
            assert store.take_over(scope, observed(), lease=OVER, ttl=TTL)
            assert store.set_lease(fence(), OVER, ttl=TTL)
            assert store.park_abandoned(scope, observed())
            assert not store.release(fence())
            assert not store.park(fence())
            assert not store.complete(fence(), OUTCOME, ttl=TTL)
            assert not store.start_over(scope, observed(), HASH, lease=OVER, ttl=TTL)

    def operation() -> None:
        for _ in range(2):
            with claim(stepped.name, account_id="acme", key="steps", payload=1) as run:
                if not run.replayed:
                    run.result = current_claim().step("one", lambda: 1)
                    current_claim().renew()

    tasks = tasks_of(every_change) + tasks_of(operation)
    assert {verb for verb, _ in tasks} == {"INSERT", "UPDATE", "SELECT"}
    assert [count for _, count in tasks] == [1] * len(tasks), tasks


@pytest.mark.failure_mode(2)
def test_a_duplicate_waits_a_second_for_a_frozen_process_and_the_coordinator_ends_that() -> None:
    store, scope = sql.store("default"), Scope("acme", "scale.frozen", "key")

    def take() -> Any:
        with transaction.atomic(durable=True):
            sql.store("default").commit_at_once()
            return sql.store("default").insert_claim(scope, HASH, lease=LEASE, ttl=TTL, wait_for_disk=False)

    record_id, gate = take(), Gate()

    def complete_and_freeze() -> str:
        try:
            with transaction.atomic(durable=True):
                assert sql.store("default").complete(Fence(scope, record_id, 1, HASH), OUTCOME, ttl=TTL)
                gate.pass_through()
        except Exception as error:  # noqa: BLE001 - the driver's, at a COMMIT
            return str(error)
        return "committed"

    with held(complete_and_freeze, gate) as frozen:
        began = time.monotonic()
        with pytest.raises(OperationalError) as refused:
            take()
        assert store.timed_out_waiting(refused.value)
        assert 0.9 < time.monotonic() - began < 3
        wait_until(lambda: not idle_in_transaction(), "the coordinator ends the frozen process's session")
    assert "idle-in-transaction timeout" in frozen.result()
    assert take() is None


def idle_in_transaction() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'")
        return cursor.fetchone() is not None


def fill(count: int, **options: Any) -> list[int]:
    """Records of many accounts, so of all shards."""
    return [make_records(1, account_id=f"account-{number}", **options)[0] for number in range(count)]


@pytest.mark.failure_mode(9)
def test_sweeps_at_once_settle_and_tell_each_claim_once() -> None:
    fill(200, status=Status.IN_PROGRESS, lease=-HOUR, operation=swept.name)
    told: Counter[str] = Counter()

    def receive(account_id: str, **arguments: Any) -> None:
        told[account_id] += 1

    signals.recovered.connect(receive)
    try:
        results = race([lambda: sum(batch.recoverable for batch in recover_batches(batch_size=20))] * 4)
    finally:
        signals.recovered.disconnect(receive)
    assert (sum(results), len(told), {*told.values()}) == (200, 200, {1})
    assert IdempotencyRecord.objects.recoverable().count() == 200  # type: ignore[attr-defined]


@pytest.mark.failure_mode(30)
def test_purges_at_once_delete_each_record_once_with_its_steps() -> None:
    kept = fill(20, expires=HOUR) + fill(20, status=Status.IN_PROGRESS, lease=-HOUR)
    due = fill(300)
    for pk, account in IdempotencyRecord.objects.values_list("pk", "account_id"):
        IdempotencyStep.objects.create(account_id=account, record_id=pk, name="one", result="1")
    shares = race([lambda: sum(batch.deleted for batch in purge_batches(batch_size=50, jobs=2))] * 3)
    assert sum(shares) == len(due)
    assert remaining() == {*kept} == {*IdempotencyStep.objects.values_list("record_id", flat=True)}
    assert [purge_once(batch_size=50).deleted for _ in range(2) if fill(60)] == [50, 50]


def test_relays_at_once_send_each_message_once_and_in_order() -> None:
    broker.reset()
    for number in range(60):
        with transaction.atomic():
            publish("orders.placed", number, ordering_key=f"order-{number % 3}", sender=SENDER)
    race([lambda: sum(batch.sent for batch in relay_batches(batch_size=7))] * 4)
    for _ in relay_batches():
        pass
    assert sorted(broker.payloads) == [*range(60)]
    for order in range(3):
        of_order = [number for number in broker.payloads if number % 3 == order]
        assert of_order == sorted(of_order)


def test_the_statistics_are_those_of_all_shards() -> None:
    fill(300)
    numbers = stats()
    assert numbers.records.value == 300
    assert numbers.table_bytes.value is not None
    assert numbers.table_bytes.value > 32 * 8192
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE idempotency_record")
    assert sql.store("default").measure().records == 300


def test_a_table_that_citus_does_not_know_is_a_warning() -> None:
    (message,) = check_databases(None, databases=["default"])
    assert message.id == "idempotency.W014"
    assert "django_session" in message.msg
    assert "testproject_transfer" not in message.msg
