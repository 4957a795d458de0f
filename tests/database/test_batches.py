"""What all work in batches has in common: bounds, batch after batch, and for each a transaction of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.db.models import F

from idempotency import Operation
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.operate import batches
from idempotency.operate.batches import BatchResult
from idempotency.operate.erasure import erase_batches, find_rows
from idempotency.operate.purge import purge_batches, purge_body_batches
from idempotency.operate.sweep import recover_batches
from idempotency.outbox.backlog import purge_sent_batches
from idempotency.outbox.models import MessageStatus, OutboxMessage
from idempotency.outbox.relay import relay_batches
from idempotency.protocol.faults import fault_point
from idempotency.store import Store, store_for
from idempotency.store.postgresql import PostgreSQLStore
from tests.concurrency.racing import elsewhere, race
from tests.database.statements import before_statement, execute, explaining, fill, fill_outbox
from tests.outbox import make_messages
from tests.records import HOUR, from_now, make_bodies, make_records, remaining

pytestmark = pytest.mark.django_db(transaction=True)

again = Operation("tests.batches")


@dataclass(frozen=True)
class Work:
    """One kind of it."""

    make_due: Callable[..., Any]
    batches: Callable[..., Iterator[BatchResult]]
    largest: int
    #: Which records are left, and the word by which the statement is known that changes what was found.
    left: Callable[[], set[int]] = remaining
    changes: str = "DELETE"

    def take(self, batch_size: int) -> BatchResult:
        return next(self.batches(batch_size=batch_size))


PURGE = Work(make_records, purge_batches, 10_000)
PURGE_MESSAGES = Work(
    lambda count: make_messages(count, MessageStatus.SENT, sent=-96 * HOUR), purge_sent_batches, 10_000
)
PURGE_BODIES = Work(
    make_bodies,
    purge_body_batches,
    10_000,
    lambda: {*IdempotencyRecord.objects.exclude(body_expires_at=None).values_list("pk", flat=True)},
    "response_headers",
)
RELAY = Work(make_messages, relay_batches, 500)
SWEEP = Work(
    lambda count: make_records(count, Status.IN_PROGRESS, expires=HOUR, lease=-HOUR, operation=again.name),
    recover_batches,
    10_000,
)
ERASURE = Work(make_records, lambda **options: erase_batches(find_rows("1"), **options), 500)

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


# What both purges of records have in common

every_purge = pytest.mark.parametrize("work", [PURGE, PURGE_BODIES], ids=["purge", "bodies"])


@every_purge
def test_a_batch_takes_the_oldest(work: Work) -> None:
    newest = work.make_due(5)
    work.make_due(5, **({"expires": -2 * HOUR} if work is PURGE else {"due": 2 * HOUR}))
    batch = work.take(4)
    assert (batch.touched, batch.exhausted) == (4, False)
    assert work.left() > {*newest}


@pytest.mark.failure_9
@pytest.mark.failure_30
@every_purge
def test_purges_at_once_share_the_work(work: Work) -> None:
    kept = make_records(20, expires=HOUR) + make_records(20, Status.IN_PROGRESS, lease=-HOUR, expires=HOUR)
    work.make_due(150)
    # A database that locks no rows while it looks lets one find what another one has taken, and end.
    shares = race([lambda: sum(batch.touched for batch in work.batches(batch_size=7))] * 4)
    assert sum(shares) + sum(batch.touched for batch in work.batches()) == 150
    assert not work.left() - {*kept}
    assert remaining() >= {*kept}


@pytest.mark.failure_30
@every_purge
def test_a_record_that_is_claimed_anew_between_finding_and_changing_stays(work: Work) -> None:
    revived, *_ = work.make_due(3)

    def claim_anew() -> None:
        IdempotencyRecord.objects.filter(pk=revived).update(status=Status.IN_PROGRESS)

    with before_statement(work.changes, claim_anew):
        batch = work.take(10)
    assert (batch.touched, batch.exhausted) == (2, True)
    assert work.left() == {revived}


@pytest.mark.postgres
@pytest.mark.failure_30
@every_purge
@pytest.mark.parametrize("vendor", [PostgreSQLStore, Store], ids=["postgresql", "portable"])
def test_a_record_that_is_locked_is_passed_over(
    work: Work, vendor: type[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that starts the record over has its row. MySQL and MariaDB run the portable statement, as here."""
    claimed, *_ = work.make_due(3)
    monkeypatch.setattr(batches, "store_for", lambda using: vendor(connections[using]))
    with transaction.atomic():
        IdempotencyRecord.objects.filter(pk=claimed).update(error="is written at this moment")
        # A batch that takes nothing is the last one, so that a loop over batches ends.
        assert elsewhere(lambda: [batch.touched for batch in work.batches(batch_size=1)]) == [1, 1, 0]
    assert work.left() == {claimed}


@every_purge
def test_a_batch_that_is_cut_off_before_its_commit_has_changed_nothing(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = work.make_due(3)

    def die() -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setitem(fault_point, "purge.selected", die)
        with pytest.raises(SystemExit):
            work.take(5)
    assert work.left() == {*due}
    assert work.take(5).touched == 3


#: What of each is refused under REPEATABLE READ if a row has changed since the snapshot.
RACED = [
    pytest.param(PURGE, "SKIP LOCKED", IdempotencyRecord.objects, "attempt", id="purge"),
    pytest.param(PURGE_BODIES, "SKIP LOCKED", IdempotencyRecord.objects, "attempt", id="bodies"),
    pytest.param(SWEEP, "SKIP LOCKED", IdempotencyRecord.objects.filter(operation=again.name), "attempt", id="sweep"),
    pytest.param(RELAY, "SKIP LOCKED", OutboxMessage.objects, "attempts", id="relay"),
]


@pytest.mark.failure_16
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
    ("work", "index"),
    [
        pytest.param(PURGE, "idempotency_record_due", id="records", marks=pytest.mark.whole_table),
        pytest.param(PURGE_BODIES, "idempotency_record_body", id="bodies", marks=pytest.mark.whole_table),
        pytest.param(PURGE_MESSAGES, "idempotency_outbox_sent", id="messages"),
    ],
)
def test_a_purge_walks_its_index(work: Work, index: str) -> None:
    fill(2_000)
    fill_outbox(2_000)
    work.make_due(10)
    with explaining("SKIP LOCKED") as plans:
        assert work.take(5).touched == 5
    (plan,) = plans
    assert "LockRows" in plan
    assert f"Index Scan using {index}" in plan
    assert "Seq Scan on idempotency_record" not in plan


@pytest.mark.postgres
@pytest.mark.whole_table
def test_a_purge_of_records_walks_its_index_although_the_planner_knows_nothing_of_the_table() -> None:
    """As after an upgrade of the server. It would sort all that is due for each batch."""
    fill(20_000)
    IdempotencyRecord.objects.update(expires_at=from_now(-HOUR))
    with explaining("SKIP LOCKED") as plans:
        execute("DELETE FROM pg_statistic WHERE starelid = 'idempotency_record'::regclass")
        assert PURGE.take(10).touched == 10
    (plan,) = plans
    assert "Index Scan using idempotency_record_due" in plan
    assert "Sort" not in plan


def test_where_others_hold_the_first_rows_the_next_ones_are_locked() -> None:
    first, *others = sorted(make_records(4, Status.COMPLETED))
    rows = IdempotencyRecord.objects.order_by("pk")
    locked = store_for("default").lock_found(rows, 2, ["pk"], lambda found: [pk for (pk,) in found if pk != first])
    assert locked == others[:2]
