"""The purge deletes what is past retention, in bounded batches, and never a claim."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.utils import timezone

from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.sql import DeletedBatch
from idempotency.sql.portable import PortableStore
from idempotency.upkeep import retention
from idempotency.upkeep.retention import MAX_BATCH_SIZE, PurgeResult, due, purge_batches, purge_once
from tests.database.statements import before_statement, explaining, in_thread
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


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 25])
def test_batches_go_on_until_nothing_is_due(count: int) -> None:
    make_records(count)
    kept = make_records(3, expires=HOUR)
    batches = [batch.deleted for batch in purge_batches(batch_size=10)]
    assert batches == [10] * (count // 10) + [count % 10]
    assert remaining() == {*kept}


def test_records_that_expire_at_one_instant_are_all_purged() -> None:
    ids = make_records(25)
    instant = IdempotencyRecord.objects.values_list("expires_at", flat=True).get(pk=ids[0])
    IdempotencyRecord.objects.update(expires_at=instant)
    assert sum(batch.deleted for batch in purge_batches(batch_size=10)) == 25
    assert remaining() == set()


def test_each_batch_is_a_transaction_of_its_own() -> None:
    make_records(5)
    batches = purge_batches(batch_size=2)
    next(batches)
    assert len(in_thread(remaining)) == 3
    assert not connection.in_atomic_block


def test_a_purge_inside_a_transaction_is_refused() -> None:
    make_records(1)
    with transaction.atomic(), pytest.raises(RuntimeError, match="durable"):
        purge_once()
    assert len(remaining()) == 1


def test_a_batch_as_large_as_allowed_is_purged_at_once() -> None:
    """A database takes a bounded number of parameters in a statement."""
    make_records(3_000)
    assert purge_once(batch_size=MAX_BATCH_SIZE).deleted == 3_000


@pytest.mark.parametrize("batch_size", [0, -1, MAX_BATCH_SIZE + 1])
def test_a_batch_without_bounds_is_refused(batch_size: int) -> None:
    with pytest.raises(ValueError, match="batch_size must be between 1 and 10000"):
        purge_once(batch_size=batch_size)


def test_the_application_clock_plays_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failure mode 5."""
    kept = make_records(1, expires=HOUR)
    make_records(1)
    ahead = timezone.now() + timedelta(days=365)
    monkeypatch.setattr(timezone, "now", lambda: ahead)
    assert purge_once().deleted == 1
    assert remaining() == {*kept}


def test_two_purges_at_once_share_the_work() -> None:
    """Failure modes 9 and 30."""
    make_records(300)
    kept = make_records(20, expires=HOUR) + make_records(20, Status.IN_PROGRESS, lease=-HOUR)
    together = Barrier(4)

    def purge() -> int:
        together.wait(timeout=30)
        try:
            return sum(batch.deleted for batch in purge_batches(batch_size=7))
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        shares = [pool.submit(purge) for _ in range(4)]
        assert sum(share.result() for share in shares) == 300
    assert remaining() == {*kept}


@pytest.mark.sqlite
def test_a_record_that_is_claimed_anew_between_finding_and_deleting_stays() -> None:
    """Failure mode 30: the DELETE judges again."""
    revived, *_ = make_records(3)

    def claim_anew() -> None:
        IdempotencyRecord.objects.filter(pk=revived).update(status=Status.IN_PROGRESS)

    with before_statement("DELETE", claim_anew):
        batch = purge_once()
    assert (batch.deleted, batch.exhausted) == (2, True)
    assert remaining() == {revived}


@pytest.mark.postgres
def test_a_record_that_is_locked_is_passed_over_without_waiting() -> None:
    """Failure mode 30: a claim that starts the record over has its row."""
    claimed, *others = make_records(3)

    def purge() -> PurgeResult:
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '5s'")  # would be an error here, and not a hanging test
        return purge_once()

    with transaction.atomic():
        IdempotencyRecord.objects.filter(pk=claimed).update(status=Status.IN_PROGRESS)
        assert in_thread(purge).deleted == 2
    assert purge_once().deleted == 0
    assert remaining() == {claimed}
    assert claimed not in others


@pytest.mark.postgres
def test_the_portable_batch_passes_over_what_is_locked_where_the_database_can() -> None:
    """MySQL and MariaDB can; it is the ORM's statement, which PostgreSQL runs as well."""
    claimed, *_ = make_records(3)

    def purge() -> DeletedBatch:
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '5s'")
        with transaction.atomic(durable=True):
            return PortableStore("default").delete_due(retention.PURGED, 10, None)

    with transaction.atomic():
        IdempotencyRecord.objects.filter(pk=claimed).update(status=Status.IN_PROGRESS)
        batch = in_thread(purge)
    assert (batch.deleted, batch.exhausted) == (2, True)
    assert remaining() == {claimed}


@pytest.mark.postgres
@pytest.mark.usefixtures("repeatable_read")
def test_a_batch_refused_because_of_a_claim_is_repeated() -> None:
    """Failure mode 16: under REPEATABLE READ a row that changed since the snapshot is an error."""
    revived, *_ = make_records(3)
    rounds = []

    def claim_anew() -> None:
        rounds.append(1)
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")  # takes the snapshot
        claim = IdempotencyRecord.objects.filter(pk=revived, status=Status.COMPLETED)
        in_thread(lambda: claim.update(status=Status.IN_PROGRESS))

    with before_statement("DELETE FROM", claim_anew):
        assert purge_once().deleted == 2
    assert len(rounds) == 2
    assert remaining() == {revived}


@pytest.mark.postgres
@pytest.mark.usefixtures("repeatable_read")
def test_a_batch_is_not_repeated_for_ever() -> None:
    ids = make_records(3)
    rounds = []

    def touch() -> None:
        rounds.append(1)
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        in_thread(lambda: IdempotencyRecord.objects.update(attempt=len(rounds)))

    with before_statement("DELETE FROM", touch), pytest.raises(OperationalError, match="could not serialize"):
        purge_once()
    assert len(rounds) == 5
    assert remaining() == {*ids}


@pytest.mark.postgres
def test_a_batch_walks_the_index_on_expires_at() -> None:
    make_records(2_000, expires=HOUR)
    make_records(10)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE idempotency_record")

    with explaining("DELETE FROM") as plans:
        purge_once(batch_size=5)
    assert "Index Scan using idempotency_record_expires_at" in plans[0]
    assert "LockRows" in plans[0]
