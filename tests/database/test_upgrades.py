"""This release alongside a newer one: its code on tables extended by a later migration, and with newer records."""

import pytest

from idempotency.contrib.dashboard.counting import counters
from idempotency.contrib.dashboard.models import IdempotencyCounter
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.operate.purge import purge_batches
from idempotency.operate.resolutions import mark_not_executed
from idempotency.operate.statistics import stats
from idempotency.operate.sweep import recover_batches
from idempotency.outbox.models import OutboxMessage
from idempotency.outbox.relay import relay_once
from idempotency.protocol import ownership
from idempotency.protocol.claim import Claim
from tests.commands import run_command
from tests.database.claiming import OUTCOME, acquire, parks
from tests.database.publishing import send
from tests.database.statements import execute
from tests.outbox import broker
from tests.records import HOUR, from_now, make_records, remaining

pytestmark = pytest.mark.django_db(transaction=True)

TABLES = [model._meta.db_table for model in (IdempotencyRecord, IdempotencyStep, OutboxMessage, IdempotencyCounter)]


@pytest.fixture
def newer_tables():
    """Tables after an additive migration, which adds a nullable column and one with a default to each."""
    for table in TABLES:
        execute(f"ALTER TABLE {table} ADD COLUMN later_note varchar(20) NULL")
        execute(f"ALTER TABLE {table} ADD COLUMN later_count integer DEFAULT 7 NOT NULL")
    yield
    for table in TABLES:
        execute(f"ALTER TABLE {table} DROP COLUMN later_note")
        execute(f"ALTER TABLE {table} DROP COLUMN later_count")


def test_a_record_runs_through_its_states_on_newer_tables(newer_tables):
    first = acquire(parks)
    Claim(first).step("pay", lambda: 71)
    assert ownership.release(first, "refused")
    second = acquire(parks)
    assert Claim(second).step("pay", lambda: 72) == 71
    ownership.record(second, OUTCOME)
    assert acquire(parks) == OUTCOME

    IdempotencyRecord.objects.update(expires_at=from_now(-HOUR))
    third = acquire(parks)
    assert third.attempt == 3
    IdempotencyRecord.objects.update(lease_expires_at=from_now(-HOUR))
    assert next(recover_batches()).parked == 1
    mark_not_executed(IdempotencyRecord.objects.get(), by="ops", reason="asked")
    fourth = acquire(parks)
    ownership.record(fourth, OUTCOME)
    assert acquire(parks) == OUTCOME
    IdempotencyRecord.objects.update(expires_at=from_now(-HOUR))
    assert next(purge_batches()).deleted == 1


def test_messages_and_counts_are_written_to_newer_tables(newer_tables):
    IdempotencyCounter.objects.all().delete()
    counters.reset()
    acquire(parks)
    counters.flush()
    assert IdempotencyCounter.objects.get(hour=0, operation=parks.name).total == 1
    send(payload={"id": 1})
    assert relay_once().sent == 1
    assert broker.payloads == [{"id": 1}]


def test_upkeep_skips_a_record_with_a_status_from_a_newer_release():
    _, newer = make_records(2, operation=parks.name)
    IdempotencyRecord.objects.filter(pk=newer).update(status="sealed", lease_expires_at=from_now(-HOUR))
    assert next(recover_batches()).settled == 0
    assert run_command("purge_idempotency", "--dry-run")[1] == ["Would purge 1 record from database 'default'."]
    assert next(purge_batches(include_parked=True)).deleted == 1
    assert remaining() == {newer}
    assert (stats().parked.value, stats().abandoned.value) == (0, 0)
