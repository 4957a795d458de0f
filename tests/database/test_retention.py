"""The purge deletes records past retention and never a claim, even under load; and ``purge_idempotency``."""

import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
from django.core.management import CommandError
from django.db import OperationalError, transaction
from django.utils import timezone

from idempotency.bodies import BODY_GONE
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.operate.purge import due, purge_batches, purge_body_batches
from idempotency.operate.sweep import recover_batches
from idempotency.outbox.models import MessageStatus, OutboxMessage
from idempotency.outbox.relay import relay_batches
from idempotency.protocol import ownership
from idempotency.protocol.ownership import Ownership
from idempotency.signals import purged
from idempotency.store import store_for
from idempotency.store.postgresql import upkeep
from tests.aliases import at_level
from tests.commands import run_command
from tests.concurrency.racing import PATIENCE, elsewhere, is_waited_for, race
from tests.database.claiming import OUTCOME, PAYLOAD, acquire, again, plain
from tests.database.statements import execute, explaining
from tests.operations import receiving
from tests.outbox import broker, make_messages, statuses
from tests.providers import eventually
from tests.records import HOUR, abandon, expire, make_bodies, make_records, remaining

pytestmark = pytest.mark.django_db(transaction=True)


def make_step(record, account="1"):
    IdempotencyStep.objects.create(account_id=account, record_id=record, name="charge", result="1")


def make_claims():
    """A live claim, an abandoned one, and one without a lease. None may ever be purged."""
    return [pk for lease in (HOUR, -HOUR, None) for pk in make_records(1, Status.IN_PROGRESS, lease=lease)]


def make_bodies_past_the_retention_of_their_records(count):
    """They are purged with their records, and not by themselves."""
    expire(*make_bodies(count))


@pytest.mark.failure_5
def test_the_application_clock_plays_no_part(monkeypatch):
    kept = make_records(1, expires=HOUR)
    make_records(1)
    ahead = timezone.now() + timedelta(days=365)
    monkeypatch.setattr(timezone, "now", lambda: ahead)
    assert next(purge_batches()).deleted == 1
    assert remaining() == {*kept}


@pytest.mark.scenario_27
@pytest.mark.failure_30
def test_steps_are_purged_only_with_their_records():
    gone, parked, *kept = [*make_records(1), *make_records(1, Status.PARKED), *make_records(1, expires=HOUR)]
    other_account, *_ = make_records(1, Status.PARKED, account_id="2")
    for pk, account in IdempotencyRecord.objects.values_list("pk", "account_id"):
        make_step(pk, account)
    make_step(gone, "2")  # two accounts share an id, as after copying rows between databases
    assert next(purge_batches()).deleted == 1
    left = IdempotencyStep.objects.values_list("account_id", "record_id")
    assert {*left} == {("1", parked), ("2", other_account), ("2", gone), *(("1", pk) for pk in kept)}


def test_the_responses_of_due_records_are_left_to_the_purge_of_records():
    """With a backlog they would be rewritten first and deleted next, and the bodies of kept records would wait."""
    make_bodies_past_the_retention_of_their_records(3)
    (kept,) = make_bodies(1)
    assert [batch.deleted for batch in purge_body_batches(batch_size=2)] == [1]
    bodies = dict(IdempotencyRecord.objects.values_list("pk", "response_body"))  # PostgreSQL does not compare json
    assert [pk for pk, body in bodies.items() if body == BODY_GONE] == [kept]


def test_kept_records_do_not_block_due_records_behind_them():
    make_records(3, expires=-3 * HOUR)
    kept = make_records(9, Status.PARKED, expires=-2 * HOUR)
    make_records(3)
    while deleted := next(purge_batches(batch_size=2)).deleted:
        assert deleted <= 2
    assert remaining() == {*kept}


@pytest.mark.sqlite
def test_steps_are_deleted_by_account_and_record():
    make_records(3)
    with explaining('DELETE FROM "idempotency_step"') as plans:
        assert next(purge_batches()).deleted == 3
    (plan,) = plans
    assert "(account_id=? AND record_id=?)" in plan


# The command: records first and then sent messages, its report, its exit codes, and its load


NOT_DUE = {MessageStatus.SENT: {"sent": -HOUR}, MessageStatus.DEAD: {"due": -96 * HOUR}, MessageStatus.PENDING: {}}


def purge(**options):
    return run_command("purge_idempotency", **options)[:2]


make_sent = partial(make_messages, status=MessageStatus.SENT, sent=-96 * HOUR)  # longer ago than the retention


def test_a_purge_deletes_all_due_rows_and_reports_them():
    make_records(1_233)
    make_bodies_past_the_retention_of_their_records(1)
    bodies = make_bodies(2)
    make_sent(1)
    kept = make_records(2, expires=HOUR) + make_records(2, Status.RECOVERABLE, expires=HOUR)
    kept += make_records(2, Status.PARKED) + make_claims()
    for status, times in NOT_DUE.items():
        make_messages(1, status, **times)
    lines = ["1,234 records", "2 recorded responses", "1 sent message"]
    assert purge() == (0, [f"Purged {line} from database 'default'." for line in lines])
    assert remaining() == {*kept, *bodies}
    kept_bodies = IdempotencyRecord.objects.values_list("pk", "response_body")
    assert {pk for pk, body in kept_bodies if body == BODY_GONE} == {*bodies}
    assert {status for status, _ in statuses()} == {*NOT_DUE}
    assert purge() == (0, ["Purged 0 records from database 'default'."])
    assert purge(verbosity=0) == (0, [])


def test_a_dry_run_counts_and_deletes_nothing():
    assert purge(dry_run=True) == (0, ["Would purge 0 records from database 'default'."])
    make_records(2)
    make_bodies_past_the_retention_of_their_records(1)
    make_records(2, Status.RECOVERABLE)
    make_records(2, Status.PARKED)
    kept = make_claims() + make_records(7, expires=HOUR) + make_bodies(4)
    make_sent(5)
    before = remaining()
    would = "Would purge {} from database 'default'."
    claims, parked = "Would keep 3 records past retention: in progress.", "Would keep 2 records past retention: parked."
    others = [would.format("4 recorded responses"), would.format("5 sent messages")]
    assert purge(dry_run=True) == (0, [would.format("5 records"), claims, parked, *others])
    assert purge(dry_run=True, include_parked=True) == (0, [would.format("7 records"), claims, *others])
    assert (remaining(), OutboxMessage.objects.count()) == (before, 5)
    assert (due().count(), due(include_parked=True).count()) == (5, 7)
    assert purge(include_parked=True)[1][0] == "Purged 7 records from database 'default'."
    assert remaining() == {*kept}


def test_rows_due_after_the_last_batch_are_left_to_the_next_run():
    make_records(1)
    with receiving(purged, then=make_records):
        assert purge() == (0, ["Purged 1 record from database 'default'."])
    assert len(remaining()) == 1


def test_a_signal_ends_a_purge_before_its_messages():
    make_records(1)
    make_sent(1)
    with (
        receiving(purged, then=lambda: signal.raise_signal(signal.SIGTERM)),
        pytest.raises(CommandError, match="Stopped by SIGTERM") as stopped,
    ):
        purge()
    assert stopped.value.returncode == 143
    assert (remaining(), OutboxMessage.objects.count()) == (set(), 1)


# Responses past their separate retention are deleted, and their records stay


def purge_bodies():
    return [batch.deleted for batch in purge_body_batches()]


@pytest.mark.parametrize(("reference", "body"), [(None, BODY_GONE), ("7", None)], ids=["alone", "with a reference"])
def test_due_bodies_are_deleted_with_their_steps_and_the_record_stays(reference, body):
    error = "ValueError: of an attempt before, which may quote the payload"
    due = make_bodies(10, error=error, response_reference=reference)
    (kept,) = make_bodies(1, due=-HOUR)  # is not due yet
    for pk in (*due, kept):
        make_step(pk)
    make_records(1, expires=HOUR)  # is kept as long as its record
    IdempotencyRecord.objects.filter(pk__in=make_bodies(1)).update(status=Status.PARKED)  # is not completed
    records = IdempotencyRecord.objects.order_by("pk").values()
    changed = {"response_body": body, "response_headers": [], "error": None, "body_expires_at": None}
    after = [record | changed if record["id"] in due else record for record in records]
    assert purge_bodies() == [10]
    assert [*records.all()] == after
    assert IdempotencyStep.objects.get().record_id == kept


# With concurrent transactions that lock records or the whole table, and under load


@pytest.mark.postgres
def test_a_purge_waits_for_a_lock_on_the_table():
    """Building an index takes this lock. The waiting batch holds none."""
    make_records(3)
    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            execute("LOCK TABLE idempotency_record IN SHARE MODE")
            batch = pool.submit(elsewhere, lambda: next(purge_batches()))
            assert eventually(is_waited_for)
        assert batch.result(PATIENCE).deleted == 3


@pytest.mark.postgres
@pytest.mark.whole_table
@pytest.mark.failure_30
@pytest.mark.parametrize("level", ["READ_COMMITTED", "REPEATABLE_READ"])
def test_a_purge_leaves_a_record_that_starts_over_before_it_is_locked(level, monkeypatch):
    """The purge is held after it takes its snapshot, in which the record is due, and before it locks rows."""
    (pk,) = make_records(1, operation=plain.name, idempotency_key="k", request_hash=PAYLOAD.request_hash)
    make_records(1)
    statement = upkeep._DELETE_RECORDS
    held = "WITH held AS MATERIALIZED (SELECT pg_advisory_xact_lock(33)), due"
    held = statement.replace("WITH due", held, 1).replace("WHERE ", "WHERE EXISTS (SELECT FROM held) AND ", 1)
    monkeypatch.setattr(upkeep, "_DELETE_RECORDS", held)

    def purge():
        with at_level(level):
            return next(purge_batches())

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            execute("SELECT pg_advisory_xact_lock(33)")
            batch = pool.submit(elsewhere, purge)
            assert eventually(is_waited_for)
            claimed = elsewhere(lambda: acquire(plain))
        assert batch.result(PATIENCE).deleted == 1
    assert (claimed.fence.id, claimed.attempt) == (pk, 2)
    assert remaining() == {pk}


@pytest.mark.scenario_27
@pytest.mark.failure_16
@pytest.mark.failure_30
@pytest.mark.parametrize(
    "level",
    [
        "READ_COMMITTED",
        pytest.param("REPEATABLE_READ", marks=pytest.mark.postgres),
        # On Citus, a claim whose COMMIT lost a race ends with an error, because its result is unknown.
        pytest.param("SERIALIZABLE", marks=[pytest.mark.postgres, pytest.mark.except_citus]),
    ],
)
def test_concurrent_purges_sweeps_and_relays_lose_no_claim(level):
    """No claim waits long enough to be refused either, which would raise an error here."""
    live = []
    abandoned = []
    for account in "abcdefghij":  # on a cluster they are in several shards
        make_records(30, account_id=account)
        live += make_records(2, Status.IN_PROGRESS, lease=HOUR, account_id=account)
        abandoned += abandon(6, again, account_id=account)
    make_messages(60)
    keys = [f"again-{number}" for number in range(40)]
    for key in keys[::2]:  # past retention, which makes no difference to their claimants
        make_records(1, operation=plain.name, idempotency_key=key, request_hash=PAYLOAD.request_hash)

    def again_and_again(take):
        """Take batches until nothing is due. The database may refuse a batch because of concurrent ones."""
        while True:
            try:
                for _ in take():
                    pass
                return
            except OperationalError as error:
                if not store_for("default").is_busy(error):
                    raise

    def claim_all(keys):
        for number, key in enumerate(keys):
            owned = acquire(plain, key)
            assert isinstance(owned, Ownership), f"{key} was answered from a record past retention"
            if number % 4 < 2:
                ownership.record(owned, OUTCOME)
            (completed if number % 4 < 2 else open_claims).add(owned.fence.id)

    kinds = [
        partial(purge_batches, batch_size=7),
        partial(recover_batches, batch_size=5),
        partial(relay_batches, batch_size=5),
    ]
    completed = set()
    open_claims = set()
    claimants = [partial(claim_all, keys[:20]), partial(claim_all, keys[20:])]
    with at_level(level):
        race([*claimants, *(partial(again_and_again, kind) for kind in kinds * 2)])
        again_and_again(kinds[0])
    assert len(completed) == len(open_claims) == 20
    assert remaining() == {*live, *abandoned} | completed | open_claims
    # A claimant's session ends with its thread, so a sweep may have released its open claims.
    unfinished = IdempotencyRecord.objects.filter(pk__in=open_claims).values_list("status", flat=True)
    assert {*unfinished} <= {Status.IN_PROGRESS, Status.RECOVERABLE}
    assert {*IdempotencyRecord.objects.in_progress().values_list("pk", flat=True)} - open_claims == {*live}
    assert {*IdempotencyRecord.objects.completed().values_list("pk", flat=True)} == completed
    assert len(broker.payloads) == 60
