"""Claims and their records: what each statement reads and writes, retention, and errors of failed attempts."""

import re
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from idempotency import PARK, Operation, Wait, claim, require_claim
from idempotency.contrib.dashboard.counting import counters
from idempotency.exceptions import InProgressError, KeyExpiredError, LeaseLostError, UnavailableError
from idempotency.identity.fingerprint import Payload
from idempotency.identity.scope import Scope
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.operate.purge import purge_batches
from idempotency.operate.resolutions import record_outcome
from idempotency.operate.sweep import recover_batches
from idempotency.outbox.relay import relay_once
from idempotency.outbox.upkeep import purge_sent_batches
from idempotency.outcome import MAX_REASON, Outcome, reason_of
from idempotency.protocol import acquisition, ownership, waiting
from idempotency.protocol.claim_request import ClaimRequest
from idempotency.protocol.decisions import take_over_abandoned
from idempotency.protocol.execution import release_or_park
from idempotency.protocol.ownership import Ownership
from idempotency.protocol.renewal import renew
from idempotency.protocol.waiting import acquire_or_wait
from idempotency.store import store_for
from tests.concurrency.failures import just_before
from tests.concurrency.traces import session_settings
from tests.database.claiming import OUTCOME, PAYLOAD, RETENTION, acquire, again, asks, parks, plain
from tests.database.statements import fill, most_rows_read
from tests.records import HOUR, MINUTE, database_now, expire, from_now, make_records

pytestmark = pytest.mark.django_db(transaction=True)

rolls_back = Operation.declare("tests.claims.rolls_back", recovery=PARK)

# What a claim reads, writes and waits for


@pytest.mark.parametrize(
    ("policy", "ends", "pauses"),
    [
        ({}, None, []),
        ({"in_progress": Wait(1)}, None, [0.02, 0.04, 0.08, 0.16, 0.25, 0.25, 0.2]),
        ({"in_progress": Wait(1)}, 2, [0.02, 0.04]),
    ],
    ids=["none", "in vain", "until the second pause"],
)
def test_a_duplicate_polls_for_the_outcome_for_as_long_as_declared(monkeypatch, policy, ends, pauses):
    operation = Operation.declare("tests.claims.waits", **policy)
    owned = acquire(operation)
    slept, expecting = [], []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == ends:
            ownership.record(owned, OUTCOME)

    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=sleep))
    with (
        just_before(waiting, "acquire", lambda request, expect_record: expecting.append(expect_record)),
        nullcontext() if ends else pytest.raises(InProgressError),
    ):
        assert acquire_or_wait(ClaimRequest(operation.policy, owned.scope, PAYLOAD)) == OUTCOME
    assert slept == pytest.approx(pauses)
    assert expecting == [False] + [True] * len(pauses)  # only the first query may insert


@pytest.mark.parametrize(
    ("is_expected", "has_one_writer", "refusal", "first"),
    [
        (False, False, None, "insert"),
        (True, False, None, "read"),
        (False, True, None, "read"),  # an insert would wait for the writer
        (False, False, KeyExpiredError(), "read"),
    ],
)
def test_a_record_is_read_first_if_an_insert_would_wait_or_fail(
    monkeypatch, is_expected, has_one_writer, refusal, first
):
    ownership.record(acquire(plain), OUTCOME)
    store = store_for("default")
    monkeypatch.setattr(store, "has_one_writer", has_one_writer)
    seen = []
    with (
        just_before(store, "insert_claim", lambda *args, **options: seen.append("insert")),
        just_before(store, "read", lambda *args: seen.append("read")),
    ):
        request = ClaimRequest(plain.policy, Scope("1", plain.name, "k"), PAYLOAD, refusal)
        assert acquisition.acquire(request, expect_record=is_expected) == OUTCOME
    assert seen[0] == first


@pytest.mark.parametrize(
    ("operation", "undone_by_crash", "commits"),
    [
        (plain, True, True),
        (rolls_back, False, True),
        (again, False, False),
        (parks, False, False),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_store_is_passed_what_it_may_lose_and_when_to_commit(operation, undone_by_crash, commits):
    """A lost claim is harmless if its effects follow in the same database and may run again."""
    received = {}
    store = store_for("default")
    with (
        just_before(store, "insert_claim", lambda *args, **options: received.update(options)),
        just_before(store, "complete", lambda *args, **options: received.update(options)),
        # Called where one statement isn't enough.
        just_before(store, "own_transaction", lambda what: received.update(whole=True)),
        claim(operation, account_id="1", key="k"),
    ):
        pass
    assert (received["undone_by_crash"], received["commit"]) == (undone_by_crash, commits)
    assert ("whole" in received) is (connection.vendor == "mysql")


def test_every_statement_about_a_record_names_its_account():
    """On a table partitioned by account, each statement then reads a single partition."""
    with CaptureQueriesContext(connection) as captured:
        abandoned = acquire(asks)
        with claim(again, account_id="1", key="k") as run:
            run.claim.step("one", lambda: 1)
    IdempotencyRecord.objects.update(lease_expires_at=from_now(-HOUR))
    IdempotencyRecord.objects.filter(operation=again.name).update(expires_at=from_now(-HOUR))
    with CaptureQueriesContext(connection) as captured_later:
        reconcile(abandoned)
        assert isinstance(acquire(again), Ownership)
    statements = [
        one["sql"] for one in (*captured, *captured_later) if re.search("idempotency_(record|step)", one["sql"])
    ]
    assert len(statements) > 10
    assert [sql for sql in statements if not re.search("INSERT|WHERE.*account_id", sql, re.DOTALL)] == []


@pytest.mark.parametrize(("change", "expires"), [("take_over", HOUR), ("start_over", -HOUR)])
def test_a_record_taken_over_since_it_was_read_keeps_its_steps(change, expires):
    owned = acquire(plain)
    IdempotencyStep.objects.create(account_id="1", record_id=owned.fence.id, name="of the other attempt", result="1")
    IdempotencyRecord.objects.update(lease_expires_at=from_now(-HOUR), expires_at=from_now(expires))

    def overtake(*args, **options):
        IdempotencyRecord.objects.update(attempt=2, lease_expires_at=from_now(HOUR))

    with just_before(store_for("default"), change, overtake), pytest.raises(InProgressError):
        acquire(plain)
    assert IdempotencyStep.objects.count() == 1


@pytest.mark.django_db
def test_a_claim_registers_no_on_commit_callback_in_a_test_case(django_capture_on_commit_callbacks):
    with django_capture_on_commit_callbacks() as left, claim(plain, account_id="1", key="k"):
        pass
    assert left == []


# Reads of a statement, and its traces in a surrounding transaction


def take_over(owned):
    IdempotencyRecord.objects.filter(pk=owned.fence.id).update(lease_expires_at=from_now(-HOUR))
    return take_over_abandoned(parks.policy, owned.fence, store_for("default"))


@pytest.mark.postgres
@pytest.mark.except_citus  # whose plans don't count rows
@pytest.mark.failure_67
@pytest.mark.parametrize(
    "change",
    [lambda owned: ownership.record(owned, OUTCOME), ownership.release, ownership.park, renew, take_over],
    ids=["complete", "release", "park", "renew", "take over"],
)
def test_a_fenced_change_reads_its_own_record_and_no_other_claim(change):
    """This holds even if the planner believes that no record is in progress and that their index is empty."""
    fill(2000)
    owned = acquire(parks)
    make_records(500, Status.IN_PROGRESS, expires=HOUR, lease=HOUR)
    assert most_rows_read(lambda: change(owned)) == 1


@pytest.mark.failure_84
@pytest.mark.postgres
def test_an_interrupted_claim_leaves_a_usable_connection():
    def interrupted():
        with store_for("default").own_statement("A claim"):
            connection.connection.pgconn.send_query(b"SELECT 1")  # its answer is never read
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert isinstance(acquire(parks), Ownership)
    assert connection.get_autocommit()


@pytest.mark.skipif(connection.vendor == "mysql", reason="BEGIN commits the open transaction")
def test_a_claim_is_refused_in_a_transaction_that_bypassed_django():
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
        try:
            with pytest.raises(UnavailableError):
                acquire(parks)
        finally:
            cursor.execute("ROLLBACK")
    assert isinstance(acquire(parks), Ownership)


def test_an_error_in_own_transaction_is_raised_unchanged():
    with pytest.raises(RuntimeError, match="on purpose"), store_for("default").own_transaction("A claim"):
        raise RuntimeError("on purpose")


def bounds():
    names = ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout", "synchronous_commit")
    return session_settings(*names)


@pytest.mark.postgres
@pytest.mark.failure_59
@pytest.mark.django_db
def test_no_session_setting_remains_in_a_tests_transaction():
    """The transaction lasts as long as the test, so a leftover timeout would end its connection after a short pause."""
    before = bounds()
    for replayed in (False, True):
        with claim(plain, account_id="1", key="k") as run:
            assert run.replayed is replayed
            run.result = 1
    with claim(parks, account_id="1", key="k"):
        require_claim().step("a", lambda: 1)
        require_claim().renew()
    take_over(acquire(parks, "taken"))
    ownership.release(acquire(parks, "released"))
    ownership.park(acquire(parks, "parked"))
    for batches in (purge_batches, recover_batches, purge_sent_batches):
        next(batches())
    for work in (relay_once, counters.flush):
        work()
    assert bounds() == before


def own_again(**state):
    acquire(plain)
    IdempotencyRecord.objects.update(**state)
    return acquire(plain)


@pytest.mark.parametrize(
    "own",
    [
        lambda: acquire(plain),
        lambda: own_again(lease_expires_at=from_now(-HOUR)),
        lambda: own_again(status=Status.RECOVERABLE, lease_expires_at=None),
        lambda: own_again(lease_expires_at=from_now(-HOUR), expires_at=from_now(-HOUR)),
    ],
    ids=["first", "abandoned", "released", "past retention"],
)
def test_an_owner_gets_a_full_lease(own):
    assert isinstance(own(), Ownership)
    assert (
        timedelta(0)
        <= plain.policy.lease - (IdempotencyRecord.objects.get().lease_expires_at - database_now())
        < MINUTE / 4
    )


def test_an_attempt_whose_outcome_was_refused_has_lost_its_lease():
    owned = acquire(parks)
    IdempotencyRecord.objects.update(attempt=2)
    with pytest.raises(LeaseLostError):
        ownership.record(owned, OUTCOME)
    with pytest.raises(LeaseLostError):
        owned.ensure()


# Retention is counted from the latest change of a record's owner or outcome


def is_kept_for_the_whole_retention():
    return timedelta(0) <= RETENTION - (IdempotencyRecord.objects.get().expires_at - database_now()) < MINUTE


def test_an_outcome_is_dated_when_it_is_written_not_at_transaction_start():
    """On PostgreSQL ``now()`` doesn't advance during a transaction."""
    with claim(plain, account_id="1", key="k") as run:
        run.result = 1
        database_now()  # BEGIN is sent with it
        late = database_now()
    record = IdempotencyRecord.objects.get()
    assert late <= record.completed_at
    assert late + RETENTION <= record.expires_at


def reconcile(owned):
    assert isinstance(acquire_or_wait(ClaimRequest(asks.policy, owned.scope, PAYLOAD)), Outcome)


def park_and_record(owned):
    ownership.park(owned)
    record_outcome(IdempotencyRecord.objects.get(), {"found": True}, by="ops")


@pytest.mark.failure_69
@pytest.mark.parametrize(
    ("operation", "lease", "change"),
    [
        pytest.param(asks, HOUR, renew, id="a renewed lease"),
        pytest.param(asks, HOUR, lambda owned: ownership.postpone(owned, HOUR), id="a postponed lease"),
        pytest.param(plain, -HOUR, lambda owned: acquire(plain), id="a take-over"),
        pytest.param(asks, -HOUR, reconcile, id="an outcome that a reconciler finds"),
        pytest.param(parks, HOUR, park_and_record, id="an outcome that an operator records"),
    ],
)
def test_retention_restarts_with(operation, lease, change):
    owned = acquire(operation)
    IdempotencyRecord.objects.update(expires_at=from_now(MINUTE), lease_expires_at=from_now(lease))
    change(owned)
    assert is_kept_for_the_whole_retention()


@pytest.mark.failure_69
def test_a_late_outcome_is_kept_for_full_retention_and_not_extended_by_use():
    owned = acquire(plain)
    IdempotencyRecord.objects.update(expires_at=from_now(-HOUR))
    ownership.record(owned, OUTCOME)
    assert is_kept_for_the_whole_retention()
    assert next(purge_batches()).deleted == 0
    IdempotencyRecord.objects.update(expires_at=from_now(MINUTE))
    assert acquire(plain) == OUTCOME
    assert not is_kept_for_the_whole_retention()


def test_body_retention_starts_with_the_outcome():
    ownership.record(acquire(plain), Outcome(201, body="1", body_retention=HOUR))
    assert timedelta(0) <= HOUR - (IdempotencyRecord.objects.get().body_expires_at - database_now()) < MINUTE


def test_a_request_that_starts_over_keeps_nothing_of_the_earlier_outcome():
    ownership.record(acquire(plain), Outcome(409, (), "{}", reference="1", body_retention=HOUR))
    expire(IdempotencyRecord.objects.get().pk)
    acquire(plain)
    response = ("response_status", "response_headers", "response_body", "response_reference")
    kept = IdempotencyRecord.objects.values_list("completed_at", "body_expires_at", *response).get()
    assert kept == (None,) * 6


@pytest.mark.failure_69
def test_a_longer_retention_of_an_earlier_policy_is_kept():
    owned = acquire(plain)
    IdempotencyRecord.objects.update(expires_at=from_now(10 * RETENTION))
    ownership.record(owned, OUTCOME)
    assert IdempotencyRecord.objects.get().expires_at - database_now() > 9 * RETENTION


# A record keeps the error of its latest failed attempt, at no cost for attempts that succeed


def fail(operation):
    with pytest.raises(ValueError, match="no such"), claim(operation, account_id="1", key="k"):
        raise ValueError("no such customer")


@pytest.mark.parametrize(
    ("operation", "left"),
    [
        (plain, Status.RECOVERABLE),
        (again, Status.RECOVERABLE),
        (rolls_back, Status.RECOVERABLE),
        (parks, Status.PARKED),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_failed_attempt_stores_its_error(operation, left):
    fail(operation)
    record = IdempotencyRecord.objects.get()
    assert (record.status, record.error) == (left, "ValueError: no such customer")


def test_a_later_attempt_keeps_the_error_and_a_new_request_clears_it():
    fail(plain)
    release_or_park(acquire(plain, payload=Payload(None)))  # no error, but a response that is not recorded
    for _ in range(2):
        with claim(plain, account_id="1", key="k") as run:
            if not run.replayed:
                run.result = None
    record = IdempotencyRecord.objects.get()
    assert (record.status, record.error) == (Status.COMPLETED, "ValueError: no such customer")
    expire(record.pk)
    acquire(plain, payload=Payload(None))
    assert IdempotencyRecord.objects.get().error is None


def test_an_attempt_that_is_parked_without_an_error_keeps_the_earlier_one():
    fail(parks)
    IdempotencyRecord.objects.update(status=Status.RECOVERABLE)
    release_or_park(acquire(parks, payload=Payload(None)))
    record = IdempotencyRecord.objects.get()
    assert (record.status, record.error) == (Status.PARKED, "ValueError: no such customer")


class UnreadableError(Exception):
    def __str__(self):
        raise TypeError


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UnreadableError(), "UnreadableError"),
        (ValueError("a\x00b\ud800"), "ValueError: a\ufffdb?"),
        (ValueError("x" * 5000), "ValueError: " + "x" * (MAX_REASON - len("ValueError: "))),
        (KeyError(), "KeyError: "),
    ],
)
def test_any_error_has_a_reason_that_can_be_stored(error, reason):
    assert reason_of(error) == reason
