"""What all work in batches has in common: bounds, batch after batch, and for each a transaction of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.db.models import F

from idempotency import Operation
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord, MessageStatus, OutboxMessage
from idempotency.outbox.backlog import purge_sent_batches
from idempotency.outbox.relay import relay_batches
from idempotency.upkeep.batches import BatchResult
from idempotency.upkeep.bodies import purge_body_batches
from idempotency.upkeep.erasure import erase_batches, find_traces
from idempotency.upkeep.retention import purge_batches
from idempotency.upkeep.sweep import recover_batches
from tests.concurrency.racing import elsewhere
from tests.database.statements import before_statement, explaining, fill, fill_outbox
from tests.outbox import make_messages
from tests.records import HOUR, from_now, make_bodies, make_records

pytestmark = pytest.mark.django_db(transaction=True)

again = Operation("tests.batches")


@dataclass(frozen=True)
class Work:
    """One kind of it."""

    make_due: Callable[[int], object]
    batches: Callable[..., Iterator[BatchResult]]
    largest: int

    def take(self, batch_size: int) -> BatchResult:
        return next(self.batches(batch_size=batch_size))


PURGE = Work(make_records, purge_batches, 10_000)
PURGE_MESSAGES = Work(
    lambda count: make_messages(count, MessageStatus.SENT, sent=-96 * HOUR), purge_sent_batches, 10_000
)
PURGE_BODIES = Work(make_bodies, purge_body_batches, 10_000)
RELAY = Work(make_messages, relay_batches, 500)
SWEEP = Work(
    lambda count: make_records(count, Status.IN_PROGRESS, expires=HOUR, lease=-HOUR, operation=again.name),
    recover_batches,
    10_000,
)
ERASURE = Work(make_records, lambda **options: erase_batches(find_traces("1"), **options), 500)

every_kind = pytest.mark.parametrize(
    "work",
    [PURGE, PURGE_BODIES, PURGE_MESSAGES, RELAY, SWEEP, ERASURE],
    ids=["purge", "bodies", "messages", "relay", "sweep", "erasure"],
)


@every_kind
def test_a_batch_has_bounds(work: Work) -> None:
    for size in (0, -1, work.largest + 1):
        with pytest.raises(ValueError, match=f"batch_size must be between 1 and {work.largest}"):
            work.take(size)


@every_kind
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_batches_go_on_until_nothing_is_due(work: Work, count: int) -> None:
    work.make_due(count)
    touched = [batch.touched for batch in work.batches(batch_size=3)]
    assert [some for some in touched if some] == [3] * (count // 3) + [count % 3] * (count % 3 > 0)
    assert len(touched) <= count // 3 + 1


@every_kind
def test_a_large_batch_fits_the_database(work: Work) -> None:
    """A database takes a bounded number of parameters in a statement."""
    count = min(work.largest, 1_001)
    work.make_due(count)
    assert work.take(work.largest).touched == count


@every_kind
def test_a_batch_is_refused_inside_a_transaction(work: Work) -> None:
    """It would be neither committed nor bounded by itself."""
    work.make_due(1)
    with transaction.atomic(), pytest.raises(RuntimeError, match="durable"):
        work.take(1)
    assert work.take(1).touched == 1


@every_kind
def test_each_batch_is_a_transaction_of_its_own(work: Work) -> None:
    work.make_due(5)
    batches = work.batches(batch_size=2)
    next(batches)
    assert not connection.in_atomic_block
    assert elsewhere(lambda: sum(batch.touched for batch in work.batches(batch_size=5))) == 3


#: What of each is refused under REPEATABLE READ if a row has changed since the snapshot.
RACED = [
    pytest.param(
        PURGE,
        "DELETE FROM idempotency_record",
        IdempotencyRecord.objects,
        "attempt",
        id="purge",
        marks=pytest.mark.whole_table,
    ),
    pytest.param(
        PURGE_BODIES, "WITH due", IdempotencyRecord.objects, "attempt", id="bodies", marks=pytest.mark.whole_table
    ),
    pytest.param(RELAY, "SKIP LOCKED", OutboxMessage.objects, "attempts", id="relay"),
]


@pytest.mark.failure_mode(16)
@pytest.mark.postgres
@pytest.mark.usefixtures("repeatable_read")
@pytest.mark.parametrize("races", [1, 5], ids=["one race", "race upon race"])
@pytest.mark.parametrize(("work", "statement", "rows", "field"), RACED)
def test_a_batch_that_loses_a_race_is_repeated_and_not_for_ever(
    work: Work, statement: str, rows: Any, field: str, races: int
) -> None:
    rounds: list[int] = []

    def interfere() -> None:
        rounds.append(1)
        if len(rounds) <= races:
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1")  # takes the snapshot
            elsewhere(lambda: rows.update(**{field: F(field) + 1}))

    work.make_due(3)
    with before_statement(statement, interfere):
        if races == 1:
            assert work.take(10).touched == 3
        else:
            with pytest.raises(OperationalError, match="could not serialize"):
                work.take(10)
    assert len(rounds) == min(races + 1, 5)
    assert elsewhere(rows.count) == (0 if work is PURGE and races == 1 else 3)


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("work", "statement", "index"),
    [
        pytest.param(
            PURGE, "DELETE FROM", "idempotency_record_expires_at", id="records", marks=pytest.mark.whole_table
        ),
        pytest.param(PURGE_BODIES, "WITH due", "idempotency_record_body", id="bodies", marks=pytest.mark.whole_table),
        pytest.param(PURGE_MESSAGES, "SKIP LOCKED", "idempotency_outbox_sent", id="messages"),
    ],
)
def test_a_purge_walks_its_index(work: Work, statement: str, index: str) -> None:
    fill(2_000)
    fill_outbox(2_000)
    work.make_due(10)
    IdempotencyRecord.objects.past_retention().update(expires_at=from_now(-HOUR))  # no range of time divides them
    with explaining(statement) as plans:
        assert work.take(5).touched == 5
    assert len(plans) == (2 if work is PURGE else 1)
    assert all(f"Index Scan using {index}" in plan for plan in plans)
    assert "LockRows" in plans[-1]
    # A join would read every record that is due, in each batch.
    assert ("Tid Scan" in plans[-1]) is (work is not PURGE_MESSAGES)
