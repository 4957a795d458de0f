"""How many messages an operation sends to PostgreSQL, and what they leave in the session."""

import pytest
from django.contrib.auth import get_user_model
from django.db import connection, transaction

from idempotency import claim, foreign
from idempotency.exceptions import InProgressError, LeaseLostError
from idempotency.identity.scope import Scope
from idempotency.models import IdempotencyRecord
from idempotency.store import Row, store_for
from idempotency.store.postgresql import CitusStore
from testproject.models import Transfer
from tests.aliases import pool_of_one, reconnected
from tests.concurrency.racing import changing_elsewhere
from tests.database.statements import execute
from tests.http.callers import reopen_claim
from tests.records import HOUR
from tools.benchmarks.instruments import round_trips

# On Citus, BEGIN, the statements, the settings and COMMIT are separate messages.
pytestmark = [pytest.mark.postgres, pytest.mark.except_citus, pytest.mark.django_db(transaction=True)]


@pytest.fixture(autouse=True)
def _account(transactional_db):
    get_user_model().objects.create(pk=1, username="alice")
    store_for("default")  # a process queries a database once to choose its store


def write():
    Transfer.objects.create(account_id=1, amount=1)


def write_twice():
    write()
    write()


def write_many():
    with connection.cursor() as cursor:
        cursor.executemany("SELECT %s", [[1], [2]])


def fail():
    write()
    raise LookupError


def protect(handler):
    try:
        with claim("tests.messages", account_id="1", key="k") as run:
            if not run.replayed:
                handler()
                run.result = 1
    except LookupError:
        pass
    return run.replayed


def messages(handler):
    sent = round_trips(lambda: protect(handler))
    assert sent is not None, "libpq can only show its messages on Linux"
    return sent


#: The number of messages by handler, including the claim and the message that completes and commits.
COSTS = {
    write: 3,
    write_twice: 4,
    # A block costs its two messages. If it is first, BEGIN travels with its SAVEPOINT.
    transaction.atomic(write): 5,
    lambda: write() or transaction.atomic(write)(): 6,
    transaction.atomic(transaction.atomic(write)): 7,
    # The driver sends its own BEGIN before a statement that can't share a message.
    write_many: 4,
    lambda: None: 3,
    # ROLLBACK and the release.
    fail: 4,
}


@pytest.mark.failure_105
@pytest.mark.parametrize(("handler", "sent"), COSTS.items())
def test_a_first_execution_sends_a_known_number_of_messages(handler, sent):
    assert messages(handler) == sent


@pytest.mark.parametrize("options", [{}, {"isolation_level": 3}], ids=["", "REPEATABLE READ"])
def test_begin_is_sent_once(options):
    """A private attribute suppresses the driver's own BEGIN. If it no longer does in one of the tested releases, one
    more message is sent, and the server warns of a transaction in progress."""
    warnings = []
    with reconnected(**options):
        connection.ensure_connection()
        driver = connection.connection
        driver.add_notice_handler(lambda notice: warnings.append(notice.message_primary))
        assert messages(write) == 3
        assert warnings == []
        assert (driver.autocommit, connection.get_autocommit()) == (True, True)


@pytest.mark.parametrize(("version", "sent"), [("3.1.20", 4), ("3.2", 3), ("3.3.9", 3), ("3.4", 4), ("4.0.dev1", 4)])
def test_an_untested_release_of_psycopg_sends_its_own_begin(monkeypatch, version, sent):
    monkeypatch.setattr(connection.Database, "__version__", version)
    assert messages(write) == sent


def test_psycopg_sends_its_own_begin_if_the_attribute_is_renamed(monkeypatch):
    monkeypatch.setattr(foreign, "AUTOCOMMIT", "_commits_each_statement")
    assert messages(write) == 4


def test_autocommit_is_off_in_the_handler():
    """Otherwise Django would declare the cursors of ``iterator()`` WITH HOLD."""
    seen = []
    protect(lambda: write() or seen.append(connection.connection.autocommit))
    assert seen == [False]


def test_a_wrapper_that_the_handler_installs_gets_djangos_arguments():
    seen = []

    def look(execute, sql, params, many, context):
        seen.append((many, context["connection"].alias))
        return execute(sql, params, many, context)

    protect(connection.execute_wrapper(look)(write))
    assert seen == [(False, "default")]


@pytest.fixture
def preparing():
    with reconnected(server_side_binding=True, prepare_threshold=0):
        connection.ensure_connection()
        yield


@pytest.mark.usefixtures("preparing")
def test_a_duplicate_sends_one_message_if_statements_are_prepared():
    protect(write)
    assert messages(fail) == 1
    assert protect(fail)
    reopen_claim()
    with pytest.raises(InProgressError):
        protect(fail)
    reopen_claim(lease=-HOUR)
    assert not protect(write)
    assert IdempotencyRecord.objects.get().attempt == 2


SCOPE = Scope("1", "tests.messages", "k")


def insert():
    return store_for("default").insert_claim(SCOPE, "v1:", lease=HOUR, retention=HOUR, undone_by_crash=False)


@pytest.mark.usefixtures("preparing")
def test_one_message_claims_or_reads_despite_concurrent_changes():
    with changing_elsewhere(insert):
        assert insert() is None  # the record is too new to be read
    found = insert()
    assert isinstance(found, Row)
    # The old record is read, but the new claim is returned.
    with changing_elsewhere(IdempotencyRecord.objects.all().delete):
        claimed = insert()
    assert claimed == IdempotencyRecord.objects.get().pk != found.fence.id


def test_if_the_server_binds_parameters_each_statement_is_a_message():
    with reconnected(server_side_binding=True):
        connection.ensure_connection()
        assert messages(write) == 5


def test_on_citus_each_statement_is_a_message(monkeypatch):
    monkeypatch.setattr(connection, "_idempotency_store", CitusStore(connection))
    assert messages(write) == 5


@pytest.fixture
def pool():
    with pool_of_one(min_size=1) as pooled:
        yield pooled


def test_a_pool_gets_its_session_back_unchanged(pool):
    store_for("default")
    sessions = []
    for key in ("a", "b"):
        with claim("tests.messages", account_id="1", key=key) as run:
            write()
            run.result = 1
        sessions.append(pool.connection.info.backend_pid)
        assert pool.connection.autocommit
        assert pool.connection.execute("SELECT current_setting('idempotency.completed')").fetchone() == ("",)
        pool.close()
    assert sessions[0] == sessions[1]
    pool.ensure_connection()
    assert messages(write) == 3


def write_and_be_taken_over():
    write()
    IdempotencyRecord.objects.update(attempt=2)


def test_a_setting_of_the_role_does_not_fake_a_completed_update():
    execute("SELECT set_config('idempotency.completed', 'true', false)")
    try:
        with pytest.raises(LeaseLostError):
            protect(write_and_be_taken_over)
    finally:
        execute("RESET idempotency.completed")
    assert Transfer.objects.count() == 0
