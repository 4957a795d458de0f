"""The PostgreSQL settings sent with a statement, as the server applies them, and the store chosen for a database.

``CitusStore`` sends them differently. A server without the extension accepts both ways, so both are tested here.
"""

from contextlib import closing, contextmanager
from datetime import timedelta
from itertools import count

import pytest
from django.db import OperationalError, ProgrammingError, connection, connections, transaction

from idempotency.contrib.dashboard import counting
from idempotency.contrib.dashboard.models import IdempotencyCounter
from idempotency.identity.scope import Scope
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.operate.purge import purge_body_batches
from idempotency.store import Fence, Replication, Store, TableSize, store_for, upkeep_for
from idempotency.store.postgresql import CitusStore, PostgreSQLStore, choose, choose_upkeep, statements
from tests.aliases import reconnected
from tests.concurrency.racing import race
from tests.database.claiming import OUTCOME
from tests.database.statements import execute, fill
from tests.records import make_bodies

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.postgres,
    pytest.mark.failure_2,
    pytest.mark.failure_22,
]

SCOPE = Scope("1", "tests.settings", "key")
HASH = "v1:" + "0" * 64
HOUR, OVER = timedelta(hours=1), timedelta(seconds=-1)

WAITING = {"lock_timeout": "1s"}
IDLING = {"idle_in_transaction_session_timeout": "5s"}
NO_DISK = {"synchronous_commit": "off"}


@pytest.fixture(params=[pytest.param(PostgreSQLStore, marks=pytest.mark.except_citus), CitusStore])
def store(request):
    return request.param(connection)


@pytest.fixture(params=["", "server_side_binding", "prepared"])
def binding(request):
    with reconnected(
        server_side_binding=bool(request.param), prepare_threshold=0 if request.param == "prepared" else None
    ):
        yield bool(request.param)


def insert(store, undone_by_crash=False):
    pk = store.insert_claim(SCOPE, HASH, lease=OVER, retention=OVER, undone_by_crash=undone_by_crash)
    return Fence(SCOPE, pk, 1, HASH)


def begun(store):
    """A committed claim whose lease is over."""
    IdempotencyRecord.objects.all().delete()
    with transaction.atomic(durable=True):
        return insert(store)


CHANGES = {
    "take_over": lambda store, fence: store.take_over(
        store.read(SCOPE).fence, lease=HOUR, retention=HOUR, undone_by_crash=True
    ),
    "start_over": lambda store, fence: store.start_over(
        store.read(SCOPE).fence, HASH, lease=HOUR, retention=HOUR, undone_by_crash=True
    ),
    "park_abandoned": lambda store, fence: store.park_abandoned(store.read(SCOPE).fence),
    "set_lease": lambda store, fence: store.set_lease(fence, HOUR, retention=HOUR),
    "leave_session": lambda store, fence: store.leave_session(fence, HOUR, retention=HOUR),
    "complete": lambda store, fence: store.complete(fence, OUTCOME, retention=HOUR),
    "release": lambda store, fence: store.release(fence),
    "park": lambda store, fence: store.park(fence),
}


def test_every_change_of_a_record_is_listed():
    fenced = {
        name for name, method in vars(Store).items() if "Fence" in getattr(method, "__annotations__", {}).values()
    }
    # No claim here has a session that could be gone.
    listed = {*CHANGES, "matching", "end_lease_of_gone_session"}
    assert {name for name in fenced if name[0] != "_"} == listed, (
        "list it here, and in CHANGES or ANSWERS of test_fence"
    )


def in_force():
    """The settings that differ from the session's."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT name, current_setting(name) FROM pg_settings "
            "WHERE name = ANY(%s) AND current_setting(name) <> reset_val",
            [[*WAITING, *IDLING, *NO_DISK]],
        )
        return dict(cursor.fetchall())


def test_the_settings_of_a_change_hold_until_its_transaction_ends(store, binding):
    for name, change in CHANGES.items():
        fence = begun(store)
        with transaction.atomic(durable=True):
            assert change(store, fence), name
            # After the completing update, COMMIT may wait for rows that the handler needs.
            assert in_force() == (IDLING if name == "complete" else WAITING | IDLING), name
        assert in_force() == {}


@pytest.mark.parametrize("wait_for_disk", [False, True])
def test_a_claim_waits_for_the_disk_if_it_must(store, binding, wait_for_disk):
    with transaction.atomic(durable=True):
        insert(store, undone_by_crash=not wait_for_disk)
        assert in_force() == WAITING | IDLING | ({} if wait_for_disk else NO_DISK)
    with transaction.atomic(durable=True):
        choose_upkeep(store).bound_transaction(idle=timedelta(seconds=5), wait_for_disk=wait_for_disk)
        assert in_force() == IDLING | ({} if wait_for_disk else NO_DISK)


def test_a_flush_of_counters_is_bounded_and_does_not_wait_for_the_disk(binding, monkeypatch):
    seen = []

    def add(*counts):
        add_counts(*counts)
        seen.append(in_force())

    add_counts = counting._add
    monkeypatch.setattr(counting, "_add", add)
    counting.write_counts("default", {("tests.settings", "claimed"): 1}, 1)
    assert seen == [IDLING | NO_DISK]
    assert IdempotencyCounter.objects.filter(operation="tests.settings").count() == 2


def test_a_statement_sent_with_its_settings_is_committed_on_return(store, binding):
    with store.own_statement("A claim"):
        insert(store)
        two_messages = isinstance(store, CitusStore) and binding
        assert (in_force() == {}) is not two_messages
    assert connection.get_autocommit()
    assert connection.connection.autocommit
    assert IdempotencyRecord.objects.count() == 1


def test_a_purge_finds_the_steps_of_an_id_that_needs_64_bits(binding):
    (pk,) = make_bodies(pk=2**31)
    IdempotencyStep.objects.create(account_id="1", record_id=pk, name="charge", result="1")
    assert next(purge_body_batches()).deleted == 1
    assert not IdempotencyStep.objects.exists()


def test_in_a_test_case_nothing_is_set(store):
    with transaction.atomic(), transaction.atomic():
        assert store.complete(insert(store), OUTCOME, retention=HOUR)
        assert in_force() == {}


@contextmanager
def locked(fence):
    """Another session locks the record."""
    with closing(connection.copy()) as other:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute("SELECT FROM idempotency_record WHERE id = %s AND account_id = '1' FOR UPDATE", [fence.id])
        yield


def test_a_change_sets_its_timeout_before_it_waits_for_the_record(store, monkeypatch):
    monkeypatch.setattr(statements, "WAITING", statements.Setting("lock_timeout", "10ms"))
    for name, change in CHANGES.items():
        fence = begun(store)
        with locked(fence), pytest.raises(OperationalError) as refused, store.own_statement("A change"):
            change(store, fence)
        assert store.timed_out_waiting(refused.value), name


@pytest.mark.whole_table
def test_the_table_size_is_known_and_its_row_count_only_after_analyze():
    upkeep = upkeep_for("default")
    execute("TRUNCATE idempotency_record CASCADE")
    assert upkeep.measure().records is None
    fill(1000)
    size = upkeep.measure()
    assert size == TableSize(size.in_bytes, 1000)
    assert size.in_bytes > 1000 * 100


def test_a_server_reports_what_its_commit_waits_for(store):
    execute("SET synchronous_commit = 'local'")
    try:
        assert choose_upkeep(store).replication() == Replication("local", is_synchronous=False, asynchronous_standbys=0)
    finally:
        execute("RESET synchronous_commit")


def test_a_pooler_is_detected_by_the_process_id_of_the_server(store, monkeypatch):
    assert not choose_upkeep(store).is_pooled()
    monkeypatch.setattr(type(connection.connection.info), "backend_pid", 0)
    assert choose_upkeep(store).is_pooled()


@pytest.fixture
def unknown(monkeypatch):
    """A connection to the same database under a host name that this process has not queried yet."""
    other = connection.copy()
    host = other.settings_dict["HOST"]
    monkeypatch.setitem(other.settings_dict, "HOST", ",".join([host] * next(TIMES)))
    yield other
    other.close()


TIMES = count(2)


def kind(store):
    return type(store), store.is_provisional


def known():
    """The kind of the store for this database."""
    return type(store_for("default")), False


@pytest.mark.parametrize(("autocommit", "sent"), [(False, 0), (False, 1), (True, 0)])
def test_the_query_for_the_extension_leaves_the_transaction_unchanged(unknown, autocommit, sent):
    unknown.set_autocommit(autocommit)  # off, as atomic() does
    with unknown.cursor() as cursor:
        for _ in range(sent):
            cursor.execute("SELECT 1")
    before = unknown.connection.info.transaction_status
    assert kind(choose(unknown)) == known()
    assert unknown.connection.info.transaction_status == before
    assert unknown.connection.autocommit is autocommit
    unknown.rollback()


def test_a_database_with_the_extension_gets_the_citus_store(unknown):
    with unknown.cursor() as cursor:  # a temporary table shadows the catalog's
        cursor.execute("CREATE TEMPORARY TABLE pg_extension AS SELECT 'citus' AS extname")
    assert kind(choose(unknown)) == (CitusStore, False)


def test_a_database_is_queried_for_the_extension_once(unknown):
    choose(unknown)
    unknown.close()
    assert kind(choose(unknown)) == known()
    assert unknown.connection is None


def test_a_database_that_can_not_be_queried_is_queried_again(unknown):
    unknown.set_autocommit(False)
    with unknown.cursor() as cursor, pytest.raises(ProgrammingError):
        cursor.execute("SELECT no_such_column")
    store = choose(unknown)
    assert kind(store) == (PostgreSQLStore, True)
    unknown.rollback()
    assert kind(choose(unknown)) == known()


def test_a_provisional_store_is_not_kept(unknown):
    host = unknown.settings_dict["HOST"]

    def take():
        own = connections["default"]  # each thread has its own connections
        own.settings_dict["HOST"] = "/nowhere"
        assert store_for("default") is not store_for("default")
        own.settings_dict["HOST"] = host
        assert store_for("default") is store_for("default")

    settings_of_all = dict(connection.settings_dict)
    try:
        race([take])
    finally:
        connection.settings_dict.update(settings_of_all)
