"""Behaviour common to all batch work: results, bounds, successive batches, and a transaction for each batch."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.db.models import F

from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.operate import batches
from idempotency.operate.batches import BatchResult
from idempotency.operate.erasure import erase_batches, find_rows
from idempotency.operate.purge import PurgeResult, purge_batches, purge_body_batches
from idempotency.operate.sweep import RecoveryResult, recover_batches
from idempotency.outbox.models import MessageStatus, OutboxMessage
from idempotency.outbox.relay import RelayResult, relay_batches
from idempotency.outbox.upkeep import purge_sent_batches
from idempotency.store import Upkeep, store_for, upkeep_for
from tests.aliases import at_level
from tests.concurrency.racing import elsewhere, race
from tests.database.claiming import plain
from tests.database.statements import before_statement, execute, explaining, fill, fill_outbox
from tests.outbox import make_messages
from tests.records import HOUR, abandon, from_now, make_bodies, make_records, remaining
from tools.benchmarks.upkeep import fill as fill_in_use

pytestmark = pytest.mark.django_db(transaction=True)


@dataclass(frozen=True)
class Work:
    make_due: Callable[..., Any]
    batches: Callable[..., Iterator[BatchResult]]
    largest: int = 10_000
    #: Returns the keys of the remaining rows.
    left: Callable[[], set[int]] = remaining
    #: Text that identifies the statement that changes the selected rows.
    changes: str = "DELETE"
    rows: Any = IdempotencyRecord.objects

    def take(self, batch_size):
        return next(self.batches(batch_size=batch_size))


def pks(rows):
    return lambda: {*rows.values_list("pk", flat=True)}


PURGE = Work(make_records, purge_batches)
PURGE_MESSAGES = Work(
    lambda count: make_messages(count, MessageStatus.SENT, sent=-96 * HOUR),
    purge_sent_batches,
    left=pks(OutboxMessage.objects),
    rows=OutboxMessage.objects,
)
PURGE_BODIES = Work(
    make_bodies,
    purge_body_batches,
    left=pks(IdempotencyRecord.objects.exclude(body_expires_at=None)),
    changes="response_headers",
)
RELAY = Work(
    make_messages,
    relay_batches,
    largest=500,
    left=pks(OutboxMessage.objects.exclude(status=MessageStatus.SENT)),
    rows=OutboxMessage.objects,
)
SWEEP = Work(
    lambda count: abandon(count, plain),
    recover_batches,
    left=pks(IdempotencyRecord.objects.in_progress()),
)
ERASURE = Work(make_records, lambda **options: erase_batches(find_rows("1"), **options), largest=500)

KINDS = {
    "purge": PURGE,
    "bodies": PURGE_BODIES,
    "messages": PURGE_MESSAGES,
    "relay": RELAY,
    "sweep": SWEEP,
    "erasure": ERASURE,
}
every_kind = pytest.mark.parametrize("work", KINDS.values(), ids=KINDS)
#: An erasure waits for rows that another transaction has locked.
every_kind_that_skips = pytest.mark.parametrize("work", [*KINDS.values()][:-1], ids=[*KINDS][:-1])


@every_kind
def test_a_batch_has_bounds(work):
    for size in (0, -1, work.largest + 1):
        with pytest.raises(ValueError, match=f"batch_size must be between 1 and {work.largest}"):
            work.take(size)


@every_kind
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_batches_go_on_until_nothing_is_due(work, count):
    work.make_due(count)
    touched = [batch.touched for batch in work.batches(batch_size=3)]
    assert [some for some in touched if some] == [3] * (count // 3) + [count % 3] * (count % 3 > 0)
    assert len(touched) <= count // 3 + 1


@every_kind
def test_a_large_batch_fits_the_database(work):
    """Databases limit the number of parameters in a statement."""
    count = min(work.largest, 1_001)
    work.make_due(count)
    assert work.take(work.largest).touched == count


@every_kind
def test_a_batch_is_refused_inside_a_transaction(work):
    """Otherwise the outer transaction would decide when the batch commits and releases its locks."""
    work.make_due(1)
    with transaction.atomic(), pytest.raises(RuntimeError, match="durable"):
        work.take(1)
    assert work.take(1).touched == 1


@every_kind
def test_each_batch_is_a_separate_transaction(work):
    work.make_due(5)
    batches = work.batches(batch_size=2)
    next(batches)
    assert not connection.in_atomic_block
    assert elsewhere(lambda: sum(batch.touched for batch in work.batches(batch_size=5))) == 3


every_purge = pytest.mark.parametrize("work", [PURGE, PURGE_BODIES], ids=["purge", "bodies"])


@every_purge
def test_a_batch_takes_the_oldest(work):
    newest = work.make_due(5)
    work.make_due(5, **({"expires": -2 * HOUR} if work is PURGE else {"due": 2 * HOUR}))
    batch = work.take(4)
    assert (batch.touched, batch.exhausted) == (4, False)
    assert work.left() > {*newest}


@pytest.mark.parametrize(
    ("work", "due"),
    [
        (PURGE, "expires_at"),
        (PURGE_BODIES, "body_expires_at"),
        (PURGE_MESSAGES, "sent_at"),
        (SWEEP, "lease_expires_at"),
    ],
    ids=["purge", "bodies", "messages", "sweep"],
)
def test_a_batch_starts_where_the_one_before_it_ended(work, due):
    """Otherwise it would read the index entries of all deleted rows, or all skipped claims, again."""
    work.make_due(3)
    batches = work.batches(batch_size=2)
    next(batches)
    (last,) = work.left()
    work.rows.filter(pk=last).update(**{due: from_now(-200 * HOUR)})
    assert [batch.touched for batch in batches] == [0]
    assert work.left() == {last}


@pytest.mark.failure_9
@pytest.mark.failure_30
@every_kind_that_skips
def test_concurrent_batches_share_the_work(work):
    kept = make_records(20, expires=HOUR)
    kept += abandon(20, "tests.batches.unknown")
    work.make_due(150)
    # Without row locks, a batch may find only rows that another one has taken, and end.
    shares = race([lambda: sum(batch.touched for batch in work.batches(batch_size=7))] * 4)
    assert sum(shares) + sum(batch.touched for batch in work.batches()) == 150
    assert not work.left() - {*kept}
    assert remaining() >= {*kept}


@pytest.mark.failure_30
@every_purge
def test_a_record_reclaimed_between_selection_and_change_stays(work):
    revived, *_ = work.make_due(3)

    def reclaim():
        IdempotencyRecord.objects.filter(pk=revived).update(status=Status.IN_PROGRESS)

    with before_statement(work.changes, reclaim):
        batch = work.take(10)
    assert (batch.touched, batch.exhausted) == (2, True)
    assert work.left() == {revived}


@pytest.mark.postgres
@pytest.mark.failure_9
@pytest.mark.failure_30
@pytest.mark.parametrize(
    "find_upkeep",
    # Citus locks rows in only one shard at a time.
    [upkeep_for, pytest.param(lambda using: Upkeep(store_for(using)), marks=pytest.mark.except_citus)],
    ids=["own", "portable"],
)
@every_kind_that_skips
def test_a_locked_row_is_skipped(work, find_upkeep, monkeypatch):
    """A claim that starts a record over locks it. MySQL and MariaDB run the portable statement tested here."""
    locked, *_ = work.make_due(3)
    row = work.rows.filter(pk=locked, account_id=work.rows.get(pk=locked).account_id)
    monkeypatch.setattr(batches, "upkeep_for", find_upkeep)
    with transaction.atomic():
        row.update(error="is written at this moment")
        # An empty batch is the last one, so that a loop over batches ends.
        assert elsewhere(lambda: [batch.touched for batch in work.batches(batch_size=1)]) == [1, 1, 0]
    assert work.left() == {locked}


@pytest.mark.failure_16
@pytest.mark.postgres
@pytest.mark.parametrize("races", [1, 5], ids=["one race", "five races"])
@pytest.mark.parametrize("kind", ["purge", "bodies", "sweep", "relay"])
def test_a_batch_that_loses_a_race_is_retried_up_to_a_limit(kind, races):
    """REPEATABLE READ refuses the batch because a row has changed since the snapshot."""
    work, rounds = KINDS[kind], []
    field = "attempts" if work is RELAY else "attempt"

    def interfere():
        rounds.append(1)
        if len(rounds) <= races:
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1")  # takes the snapshot
            elsewhere(lambda: work.rows.update(**{field: F(field) + 1}))

    work.make_due(3)
    with at_level("REPEATABLE_READ"), before_statement("FOR UPDATE SKIP LOCKED", interfere):
        if races == 1:
            assert work.take(10).touched == 3
        else:
            with pytest.raises(OperationalError, match="could not serialize"):
                work.take(10)
    assert len(rounds) == min(races + 1, 5)
    assert elsewhere(work.rows.count) == (0 if work is PURGE and races == 1 else 3)


#: For each kind of work, what its statements scan: the index of its search, then those that find rows by id.
SCANNED = {
    "purge": {"idempotency_record_due", "idempotency_record_pkey", "idempotency_step_name"},
    "bodies": {"idempotency_record_body", "idempotency_record_pkey", "idempotency_step_name"},
    "messages": {"idempotency_outbox_sent", "idempotency_outbox_message_pkey"},
    "sweep": {"idempotency_record_unfinished", "idempotency_record_pkey"},
    "erasure": {"idempotency_record_pkey", "idempotency_step_name"},
    "count": {"idempotency_record_pkey"},
}


@pytest.mark.failure_117
@pytest.mark.postgres
@pytest.mark.whole_table
def test_upkeep_searches_one_index_and_then_finds_rows_by_id():
    """An index for another condition would find all due rows, or all rows of an account, for each batch."""
    fill_in_use(100_000, body=10)
    fill_outbox(100_000)
    execute("UPDATE idempotency_outbox_message SET sent_at = sent_at - interval '9 days' WHERE id %% 5 = 0")
    execute("ANALYZE idempotency_outbox_message")
    whale = find_rows("whale")
    works = {
        "sweep": partial(next, recover_batches()),
        "bodies": partial(next, purge_body_batches(batch_size=500)),
        "purge": partial(next, purge_batches(batch_size=500)),
        "messages": partial(next, purge_sent_batches(batch_size=500)),
        "count": whale.count,
        "erasure": lambda: next(batch for batch in erase_batches(whale) if batch.records),
    }
    for name, work in works.items():
        with explaining("idempotency_") as plans:
            work()
        scanned = {found for plan in plans for found in re.findall(r"(?:using|Index Scan on|Seq Scan on) (\w+)", plan)}
        assert (name, scanned) == (name, SCANNED[name]), "\n".join(plans)


@pytest.mark.postgres
@pytest.mark.whole_table
def test_a_purge_uses_its_index_without_statistics_of_the_table():
    """Upgrading the server drops statistics. Without the index, each batch would sort all due records."""
    fill(20_000)
    IdempotencyRecord.objects.update(expires_at=from_now(-HOUR))
    with explaining("SKIP LOCKED") as plans:
        execute("DELETE FROM pg_statistic WHERE starelid = 'idempotency_record'::regclass")
        assert PURGE.take(10).touched == 10
    (plan,) = plans
    assert "Index Scan using idempotency_record_due" in plan
    assert "Sort" not in plan


def test_if_the_first_rows_are_taken_the_next_ones_are_locked():
    ids = sorted(make_records(5, Status.COMPLETED))
    rows = IdempotencyRecord.objects.order_by("pk")
    free = {ids[1], ids[3], ids[4]}
    locked = upkeep_for("default").lock_found(rows, 2, ["pk"], lambda found: [pk for (pk,) in found if pk in free])
    assert locked == [ids[1], ids[3]]


@pytest.mark.parametrize(
    ("first", "second", "total"),
    [
        (
            RecoveryResult(recoverable=1, completed=2, parked=3, postponed=4, exhausted=False),
            RecoveryResult(recoverable=10, completed=20, parked=30, postponed=40, unknown_operations=Counter(a=1)),
            RecoveryResult(recoverable=11, completed=22, parked=33, postponed=44, unknown_operations=Counter(a=1)),
        ),
        (
            RelayResult(sent=1, postponed=2, dead=3, put_back=4, paused={"a": "first", "b": "first"}),
            RelayResult(10, 20, 30, 40, paused={"a": "second"}, exhausted=False),
            RelayResult(11, 22, 33, 44, paused={"a": "second", "b": "first"}, exhausted=False),
        ),
        (PurgeResult(1, exhausted=False), PurgeResult(2), PurgeResult(3)),
    ],
    ids=lambda result: type(result).__name__,
)
def test_results_add_up_and_the_later_one_decides_whether_more_is_due(first, second, total):
    before = repr(first)
    assert first + second == total
    assert repr(first) == before


def test_touched_counts_the_rows_that_a_batch_changed():
    assert PurgeResult(3).touched == 3
    assert RelayResult(sent=1, postponed=2, dead=4, put_back=8).touched == 7
    with pytest.raises(NotImplementedError):
        _ = BatchResult().touched
