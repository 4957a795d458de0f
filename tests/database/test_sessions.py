"""The database session of a claim's handler ends, and a retry or a sweep settles the claim."""

import threading
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.db import DatabaseError, connection, transaction
from django.db.models import F

from idempotency import claim, signals
from idempotency.exceptions import InProgressError, LeaseLostError, UnavailableError
from idempotency.identity.fingerprint import Payload
from idempotency.identity.scope import Scope
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.operate.sweep import recover_batches
from idempotency.store import Fence, store_for
from idempotency.store.postgresql import CitusStore, PostgreSQLStore, choose_upkeep, statements, upkeep
from idempotency.testing import records
from tests.aliases import reconnected
from tests.concurrency.racing import PATIENCE, Gate, elsewhere, held, is_waited_for
from tests.database.claiming import PAYLOAD, acquire, again, parks, plain
from tests.database.statements import execute
from tests.providers import eventually
from tests.records import HOUR, from_now, make_records

pytestmark = pytest.mark.django_db(transaction=True)


def of_postgres(test):
    """On Citus no claim names its session."""
    return pytest.mark.postgres(pytest.mark.except_citus(test))


SECOND = timedelta(seconds=1)


def own_session():
    return connection.connection.info.backend_pid


def record():
    return IdempotencyRecord.objects.get()


def entries():
    return [(entry["event"], entry.get("attempt")) for entry in record().history or ()]


def is_listed(session):
    return store_for("default").row_of("SELECT FROM pg_stat_get_activity(%s)", [session]) is not None


def claim_and_die(**options):
    """Make a claim in a session that then ends, and age the claim by a second."""
    owned = elsewhere(lambda: acquire(plain, **options))
    assert eventually(lambda: not is_listed(record().session))
    grow_old()
    return owned


def grow_old(by=SECOND):
    IdempotencyRecord.objects.update(lease_expires_at=F("lease_expires_at") - by)


@of_postgres
@pytest.mark.parametrize("operation", [plain, again, parks], ids=str)
def test_a_claim_names_its_session_if_a_crash_undoes_the_attempt(operation):
    acquire(operation)
    assert record().session == (own_session() if operation is plain else None)


@pytest.mark.except_citus  # which computes no time from a column in an update
def test_claims_on_other_databases_name_no_session():
    acquire(plain)
    if connection.vendor == "postgresql":
        IdempotencyRecord.objects.update(session=None)
    grow_old()
    assert not store_for("default").end_lease_of_gone_session(Fence.of(record()))
    assert next(recover_batches()).touched == 0
    with pytest.raises(InProgressError):
        acquire(plain)
    assert (record().session, record().history) == (None, None)


@of_postgres
def test_a_claim_behind_a_pooler_names_no_session(monkeypatch):
    """A pooler reports its own session id to the driver."""
    monkeypatch.setattr(store_for("default"), "_session", lambda undone_by_crash: own_session() + 1)
    acquire(plain)
    assert record().session is None


@of_postgres
@pytest.mark.parametrize("expires", [HOUR, -SECOND], ids=["take over", "start over"])
def test_a_later_claim_behind_a_pooler_does_not_keep_the_earlier_session(monkeypatch, expires):
    claim_and_die()
    IdempotencyRecord.objects.update(lease_expires_at=from_now(-SECOND), expires_at=from_now(expires))
    monkeypatch.setattr(store_for("default"), "_session", lambda undone_by_crash: own_session() + 1)
    assert acquire(plain).attempt == 2
    assert record().session is None


@contextmanager
def connection_closed_by(signal, **changes):
    """In the block, a receiver of the signal closes the connection, as ``close_old_connections()`` may.

    :param changes: fields of the record that have changed when the handler begins.
    """

    def close(**event):
        closed = own_session()
        connection.close()
        assert eventually(lambda: not is_listed(closed))
        IdempotencyRecord.objects.update(**changes)

    signal.connect(close)
    try:
        yield
    finally:
        signal.disconnect(close)


@of_postgres
@pytest.mark.failure_116
@pytest.mark.parametrize("signal", [signals.claimed, signals.taken_over], ids=["claimed", "taken over"])
def test_no_retry_overtakes_a_handler_claimed_in_another_session(signal):
    if signal is signals.taken_over:
        claim_and_die()
        IdempotencyRecord.objects.update(lease_expires_at=from_now(-SECOND))
    with connection_closed_by(signal), claim(plain, account_id="1", key="k", payload=PAYLOAD.content) as run:
        assert record().session is None
        grow_old()
        with pytest.raises(InProgressError):
            elsewhere(lambda: acquire(plain))
        run.result = 1
    assert record().status == Status.COMPLETED


@of_postgres
@pytest.mark.failure_116
def test_a_handler_overtaken_before_its_transaction_does_not_run():
    with (
        connection_closed_by(signals.claimed, attempt=2),
        pytest.raises(LeaseLostError),
        claim(plain, account_id="1", key="k"),
    ):
        raise AssertionError
    assert (record().attempt, record().status) == (2, Status.IN_PROGRESS)


@of_postgres
def test_a_lease_that_ended_with_the_closed_session_begins_again():
    closed = connection_closed_by(signals.claimed, lease_expires_at=from_now(-SECOND))
    with closed, claim(plain, account_id="1", key="k"), pytest.raises(InProgressError):
        elsewhere(lambda: acquire(plain, payload=Payload(None)))


@of_postgres
def test_claims_in_a_testcase_and_by_test_helpers_name_no_session():
    with transaction.atomic(), transaction.atomic():
        store_for("default").insert_claim(
            Scope("1", plain.name, "k"), "v1:1", lease=HOUR, retention=HOUR, undone_by_crash=True
        )
    assert record().session is None
    IdempotencyRecord.objects.update(status=Status.RECOVERABLE)
    assert records.in_progress(record()).session is None


@of_postgres
@pytest.mark.failure_104
def test_a_retry_takes_over_from_a_gone_session_after_a_second():
    claim_and_die()
    assert acquire(plain).attempt == 2
    assert entries() == [("session_over", 1), ("taken_over", 2)]
    assert record().session == own_session()


@of_postgres
def test_each_later_attempt_names_its_session_too():
    claim_and_die()
    for attempt in (2, 3):
        assert claim_and_die().attempt == attempt
    IdempotencyRecord.objects.update(expires_at=from_now(-SECOND))
    assert acquire(plain).attempt == 4
    assert entries()[-2:] == [("session_over", 3), ("started_over", 4)]
    assert record().session == own_session()


@of_postgres
def test_an_operation_redeclared_as_one_to_park_is_parked():
    claim_and_die()
    observed = Fence.of(record())
    assert store_for("default").end_lease_of_gone_session(observed)
    assert store_for("default").park_abandoned(observed)
    assert entries() == [("session_over", 1), ("lease_over", 1)]


@of_postgres
def test_a_younger_claim_is_left_without_checking_its_session():
    claim_and_die()
    grow_old(-HOUR)  # a longer lease, so that the duration of the test doesn't matter
    with pytest.raises(InProgressError) as refused:
        acquire(plain)
    assert refused.value.retry_after == 1
    assert (record().attempt, record().history) == (1, None)


@contextmanager
def as_stranger():
    """Use a role that may not read other sessions' activity."""
    execute("CREATE ROLE stranger; GRANT ALL ON ALL TABLES IN SCHEMA public TO stranger; SET ROLE stranger")
    try:
        yield
    finally:
        execute("RESET ROLE; DROP OWNED BY stranger; DROP ROLE stranger")


@contextmanager
def without_sessions():
    """On this server only superusers may list sessions."""
    execute("RESET ROLE; REVOKE EXECUTE ON FUNCTION pg_stat_get_activity FROM PUBLIC; SET ROLE stranger")
    try:
        yield
    finally:
        execute("RESET ROLE; GRANT EXECUTE ON FUNCTION pg_stat_get_activity TO PUBLIC; SET ROLE stranger")


@of_postgres
def test_a_live_session_keeps_its_claim_for_any_role():
    gate = Gate()

    def hold():
        execute("SET track_activities TO off")
        acquire(plain)
        gate.pass_through()

    with held(hold, gate):
        grow_old()
        with as_stranger():
            for _ in range(2):
                with pytest.raises(InProgressError):
                    acquire(plain)
            assert not store_for("default").end_lease_of_gone_session(Fence.of(record()))
        assert next(recover_batches()).touched == 0
        assert (record().attempt, record().history) == (1, None)
    assert eventually(lambda: not is_listed(record().session))
    with as_stranger():
        assert acquire(plain).attempt == 2


@of_postgres
def test_a_process_id_reused_by_another_session_counts_as_alive():
    claim_and_die()
    gate, sessions = Gate(), []

    def live():
        connection.ensure_connection()
        sessions.append(own_session())
        gate.pass_through()

    with held(live, gate):
        IdempotencyRecord.objects.update(session=sessions[0])
        with pytest.raises(InProgressError):
            acquire(plain)


@of_postgres
@pytest.mark.parametrize("ended_by", ["the server", "the handler"])
def test_an_attempt_that_lost_its_session_commits_nothing(ended_by):
    gate = Gate()

    def write():
        with claim(plain, account_id="1", key="k", payload=PAYLOAD.content):
            User.objects.create(username="late")
            if ended_by == "the handler":
                connection.close()
            gate.pass_through()
            User.objects.create(username="later")

    def lose():
        with pytest.raises((UnavailableError, DatabaseError)):
            write()

    with held(lose, gate):
        if ended_by == "the server":
            execute("SELECT pg_terminate_backend(%s, 60000)", record().session)
        assert eventually(lambda: not is_listed(record().session))
        grow_old()
        assert acquire(plain).attempt == 2
    assert (record().attempt, record().status) == (2, Status.IN_PROGRESS)
    assert not User.objects.exists()


@of_postgres
def test_without_the_permission_to_list_sessions_the_lease_decides():
    claim_and_die()
    make_records(1, Status.IN_PROGRESS, operation=plain.name, lease=-HOUR)
    with as_stranger(), without_sessions():
        with pytest.raises(InProgressError):
            acquire(plain)
        assert next(recover_batches()).recoverable == 1  # the claim whose lease is over
    assert IdempotencyRecord.objects.in_progress().get().history is None


@of_postgres
def test_an_error_that_may_pass_is_not_taken_for_a_missing_permission(monkeypatch):
    claim_and_die()
    failing = "session IS NOT NULL AND 1 / (session - session) = 1"
    monkeypatch.setattr(statements, "END_LEASE", statements.END_LEASE.replace("session IS NOT NULL", failing))
    monkeypatch.setattr(PostgreSQLStore, "is_permanent", lambda store, error: False)
    with pytest.raises(UnavailableError):
        acquire(plain)
    monkeypatch.setattr(upkeep, "_END_LEASES", "SELECT 1 / 0, %s, %s, %s")
    with pytest.raises(DatabaseError):
        next(recover_batches())
    assert record().history is None


@of_postgres
def test_a_sweep_settles_claims_of_gone_sessions_only():
    claim_and_die()
    acquire(plain, key="alive")
    make_records(1, Status.IN_PROGRESS, operation=plain.name, lease=HOUR)  # names no session
    assert next(recover_batches()).recoverable == 1
    settled = IdempotencyRecord.objects.get(status=Status.RECOVERABLE)
    assert [entry["event"] for entry in settled.history] == ["session_over", "lease_over"]
    assert IdempotencyRecord.objects.in_progress().count() == 2
    assert next(recover_batches()).touched == 0


@of_postgres
def test_a_sweep_ends_no_more_leases_than_its_batch_takes():
    for number in range(3):
        elsewhere(lambda number=number: acquire(plain, key=str(number)))
    sessions = IdempotencyRecord.objects.values_list("session", flat=True)
    assert eventually(lambda: not any(map(is_listed, sessions)))
    assert next(recover_batches(batch_size=2)).settled == 2
    assert IdempotencyRecord.objects.live().count() == 1


@contextmanager
def held_sweep(monkeypatch):
    """Hold a sweep during the block, after it lists the sessions and before it locks."""
    wait = "(SELECT gone.* FROM gone, LATERAL (SELECT pg_advisory_xact_lock(32, gone.attempt)) AS held) AS gone"
    assert upkeep._END_LEASES.count("FROM gone ") == 1
    monkeypatch.setattr(upkeep, "_END_LEASES", upkeep._END_LEASES.replace("FROM gone ", f"FROM {wait} "))
    swept = []
    sweep = threading.Thread(target=lambda: swept.append(_swept()))
    with transaction.atomic():
        execute("SELECT pg_advisory_xact_lock(32, 1)")
        sweep.start()
        assert eventually(is_waited_for)
        yield
    sweep.join(PATIENCE)
    assert swept == [0]


@of_postgres
def test_a_sweep_skips_a_claim_newer_than_its_list_of_sessions(monkeypatch):
    claim_and_die()
    gate = Gate()
    taking = threading.Thread(target=lambda: _take_over_and_live(gate))
    with held_sweep(monkeypatch):
        taking.start()
        gate.wait_until_reached()
    gate.open()
    taking.join(PATIENCE)
    assert (record().status, record().attempt) == (Status.IN_PROGRESS, 2)


@of_postgres
def test_a_sweep_skips_a_claim_that_was_settled_since_it_found_it(monkeypatch):
    claim_and_die()
    with held_sweep(monkeypatch):
        elsewhere(lambda: IdempotencyRecord.objects.update(status=Status.RECOVERABLE, lease_expires_at=None))
    assert (record().status, record().lease_expires_at, record().history) == (Status.RECOVERABLE, None, None)


def _swept():
    try:
        return next(recover_batches()).touched
    finally:
        connection.close()


def _take_over_and_live(gate):
    try:
        acquire(plain)
        gate.pass_through()
    finally:
        connection.close()


@of_postgres
@pytest.mark.parametrize("chosen", [PostgreSQLStore, CitusStore])
def test_claims_on_a_citus_cluster_name_no_session(chosen):
    scope = Scope("1", plain.name, "k")
    chosen(connection).insert_claim(scope, "v1:1", lease=HOUR, retention=HOUR, undone_by_crash=True)
    assert (record().session is None) is (chosen is CitusStore)
    IdempotencyRecord.objects.update(session=0)
    if chosen is CitusStore:  # a claim of the time before the table was distributed
        assert not chosen(connection).end_lease_of_gone_session(Fence.of(record()))
    choose_upkeep(chosen(connection)).end_leases_of_gone_sessions(["another"], 1)
    assert IdempotencyRecord.objects.live().exists()
    choose_upkeep(chosen(connection)).end_leases_of_gone_sessions([plain.name], 1)
    assert IdempotencyRecord.objects.live().exists() is (chosen is CitusStore)


@of_postgres
@pytest.mark.parametrize("threshold", [None, 0])
def test_a_take_over_works_if_the_server_binds_parameters(threshold):
    claim_and_die()
    with reconnected(server_side_binding=True, prepare_threshold=threshold):
        assert acquire(plain).attempt == 2
        assert record().session == own_session()
