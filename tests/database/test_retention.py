"""The purge deletes what is past retention, in bounded batches, and never a claim."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.utils import timezone

from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.sql import DeletedBatch, Store
from idempotency.sql.portable import PortableStore
from idempotency.sql.postgresql import PostgreSQLStore
from idempotency.upkeep import retention
from idempotency.upkeep.retention import PurgeResult, due, purge_batches, purge_once
from tests.concurrency.racing import race
from tests.database.statements import before_statement, in_thread
from tests.records import HOUR, make_records, remaining

pytestmark = pytest.mark.django_db(transaction=True)


def test_what_is_past_retention_goes_and_the_rest_stays() -> None:
    make_records(2, Status.COMPLETED)
    make_records(2, Status.RECOVERABLE)
    kept = make_records(2, Status.COMPLETED, expires=HOUR) + make_records(2, Status.RECOVERABLE, expires=HOUR)
    assert due().count() == 4
    assert purge_once().deleted == 4
    assert remaining() == {*kept}
    assert not due().exists()


@pytest.mark.parametrize("lease", [HOUR, -HOUR, None], ids=["live", "abandoned", "without lease"])
@pytest.mark.parametrize("include_parked", [False, True])
def test_a_claim_is_never_purged(lease: timedelta | None, include_parked: bool) -> None:
    kept = make_records(3, Status.IN_PROGRESS, lease=lease)
    assert purge_once(include_parked=include_parked) == PurgeResult()
    assert remaining() == {*kept}


def test_a_parked_record_goes_only_when_asked_for() -> None:
    kept = make_records(3, Status.PARKED)
    make_records(1)
    assert purge_once().deleted == 1
    assert remaining() == {*kept}
    assert purge_once(include_parked=True).deleted == 3
    assert remaining() == set()


def test_a_batch_takes_no_more_than_its_size_oldest_first() -> None:
    newest = make_records(5)
    oldest = make_records(5, expires=-2 * HOUR)
    batch = purge_once(batch_size=4)
    assert (batch.deleted, batch.exhausted) == (4, False)
    assert remaining() == {*newest, oldest[-1]}


def test_records_that_expire_at_one_instant_are_all_purged() -> None:
    ids = make_records(25)
    instant = IdempotencyRecord.objects.values_list("expires_at", flat=True).get(pk=ids[0])
    IdempotencyRecord.objects.update(expires_at=instant)
    assert sum(batch.deleted for batch in purge_batches(batch_size=10)) == 25
    assert remaining() == set()


@pytest.mark.failure_mode(5)
def test_the_application_clock_plays_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = make_records(1, expires=HOUR)
    make_records(1)
    ahead = timezone.now() + timedelta(days=365)
    monkeypatch.setattr(timezone, "now", lambda: ahead)
    assert purge_once().deleted == 1
    assert remaining() == {*kept}


@pytest.mark.failure_mode(9, 30)
def test_two_purges_at_once_share_the_work() -> None:
    make_records(300)
    kept = make_records(20, expires=HOUR) + make_records(20, Status.IN_PROGRESS, lease=-HOUR)
    shares = race([lambda: sum(batch.deleted for batch in purge_batches(batch_size=7))] * 4)
    assert sum(shares) == 300
    assert remaining() == {*kept}


@pytest.mark.failure_mode(30)
@pytest.mark.sqlite
def test_a_record_that_is_claimed_anew_between_finding_and_deleting_stays() -> None:
    revived, *_ = make_records(3)

    def claim_anew() -> None:
        IdempotencyRecord.objects.filter(pk=revived).update(status=Status.IN_PROGRESS)

    with before_statement("DELETE", claim_anew):
        batch = purge_once()
    assert (batch.deleted, batch.exhausted) == (2, True)
    assert remaining() == {revived}


@pytest.mark.failure_mode(30)
@pytest.mark.postgres
@pytest.mark.parametrize("store", [PostgreSQLStore, PortableStore], ids=["postgresql", "portable"])
def test_a_record_that_is_locked_is_passed_over_without_waiting(store: type[Store]) -> None:
    """A claim that starts the record over has its row. MySQL and MariaDB run the portable statement, as here."""
    claimed, *_ = make_records(3)

    def purge() -> DeletedBatch:
        with transaction.atomic(durable=True):
            with connection.cursor() as cursor:
                cursor.execute("SET LOCAL lock_timeout = '5s'")  # would be an error here, and not a hanging test
            return store(connection).delete_due(retention.PURGED, 10, None)

    with transaction.atomic():
        IdempotencyRecord.objects.filter(pk=claimed).update(status=Status.IN_PROGRESS)
        batch = in_thread(purge)
    assert (batch.deleted, batch.exhausted) == (2, True)
    assert remaining() == {claimed}
