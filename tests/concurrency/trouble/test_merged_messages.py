"""Merging BEGIN and COMMIT into other messages makes no difference to handlers, however they begin, fail and end.

Each handler runs twice, with and without merged messages. Both runs must read the same, leave the same effects and
replay the same outcome, and leave the connection as Django would.
"""

import fcntl
import resource
import select
import signal
import socket
import threading
from functools import partial
from types import SimpleNamespace

import pytest
from django.contrib.auth import get_user_model
from django.db import connection

from idempotency import claim
from idempotency.exceptions import OutcomeUnknownError, TransactionBrokenError
from idempotency.models import IdempotencyRecord
from idempotency.store.postgresql import PostgreSQLStore, merged
from testproject.models import Transfer
from tests.concurrency.racing import PATIENCE, changing_elsewhere
from tests.concurrency.scenarios import CREATE_TRIGGER, INSERT, SCENARIOS, execute, of, write
from tests.concurrency.traces import effects, record
from tests.providers import eventually

# On Citus, BEGIN, the statements, the settings and COMMIT are separate messages.
pytestmark = [pytest.mark.postgres, pytest.mark.except_citus, pytest.mark.django_db(transaction=True)]


@pytest.fixture(params=["READ_COMMITTED", "SERIALIZABLE"])
def level(request):
    from psycopg import IsolationLevel

    return None if request.param == "READ_COMMITTED" else IsolationLevel[request.param]


@pytest.fixture
def _refusals(transactional_db):
    get_user_model().objects.create(username="alice")
    execute(CREATE_TRIGGER)
    yield
    execute("DROP FUNCTION refuse_transfer CASCADE")


def play(handler):
    try:
        with claim("tests.merged", account_id="1", key="k") as run:
            if not run.replayed:
                run.result = handler()
    except Exception as error:  # noqa: BLE001 - it is compared
        return of(error)
    return [run.replayed, run.result]


def state_of_connection():
    driver = connection.connection
    return {
        "atomic": (connection.in_atomic_block, connection.needs_rollback, connection.savepoint_ids),
        "autocommit": (connection.get_autocommit(), driver and driver.autocommit),
        "wrappers": len(connection.execute_wrappers),
        "callbacks": connection.run_on_commit,
        "driver": driver
        and (driver.closed, driver.info.transaction_status.name, driver.isolation_level, driver.read_only),
    }


def everything(handler, level):
    """The observable results of a run and its retry, in a new session."""
    IdempotencyRecord.objects.all().delete()
    Transfer.objects.all().delete()
    connection.close()
    connection.ensure_connection()
    connection.connection.isolation_level = level
    connection.rollback_exc = None  # Django keeps it, and names it as the cause of later errors
    seen = {"run": play(handler), "connection": state_of_connection()}
    connection.close()
    seen |= {"effects": effects(), "records": list(IdempotencyRecord.objects.values_list("status", "attempt"))}
    seen |= {"retry": play(write), "effects after it": effects()}
    connection.close()
    return seen


def without_merging(patched):
    patched.setattr(PostgreSQLStore, "takes_several", lambda store, cursor: False)


@pytest.mark.usefixtures("_refusals")
@pytest.mark.parametrize("name", SCENARIOS)
def test_merged_messages_change_nothing(name, level, monkeypatch):
    seen = everything(SCENARIOS[name], level)
    without_merging(monkeypatch)
    assert seen == everything(SCENARIOS[name], level)


@pytest.mark.failure_64
@pytest.mark.usefixtures("_refusals")
@pytest.mark.parametrize("end", ["COMMIT", "COMMIT AND CHAIN"])
@pytest.mark.parametrize("before", ["", "SELECT 1"], ids=["first", "second"])
def test_several_statements_that_commit_and_then_fail_are_not_rerun(before, end):
    def run():
        with claim("tests.merged", account_id="1", key="k"):
            if before:
                execute(before)
            execute(f"{INSERT}; {end}; SELECT 1 / 0")

    for error in (TransactionBrokenError, OutcomeUnknownError):
        with pytest.raises(error):
            run()
        assert (IdempotencyRecord.objects.get().status, effects()) == ("parked", ["raw"])


class InterruptedByTestError(Exception):
    """Raised by a signal handler."""


@pytest.fixture
def interrupt():
    """Make the main thread raise an error while it waits for the server."""
    raised = []

    def handle(number, frame):
        raise raised.pop()

    def interrupt(error):
        raised.append(error)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    yield interrupt
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("_refusals")
@pytest.mark.parametrize("raised", [InterruptedByTestError, KeyboardInterrupt])
def test_a_signal_while_commit_waits_changes_nothing(raised, interrupt, monkeypatch):
    """COMMIT checks a foreign key whose row another transaction has locked."""

    def see():
        IdempotencyRecord.objects.all().delete()
        Transfer.objects.all().delete()
        connection.close()
        ended = threading.Event()
        lock = partial(execute, "SELECT FROM auth_user FOR UPDATE")
        with changing_elsewhere(lock, lambda: interrupt(raised) or ended.wait(PATIENCE)):
            connection.ensure_connection()
            session = connection.connection.info.backend_pid
            try:
                end = play(write)
            except KeyboardInterrupt as error:
                end = of(error)
            finally:
                ended.set()
        assert not connection.in_atomic_block
        connection.close()
        connection.run_on_commit.clear()  # Django keeps them if its COMMIT is interrupted
        gone = "SELECT FROM pg_stat_activity WHERE pid = %s"
        assert eventually(lambda: not execute(gone, session)[1])  # COMMIT continues after its client has gone
        return [end[0][0], effects(), record().status]

    seen = see()
    without_merging(monkeypatch)
    assert seen == see()


def test_a_session_is_polled_without_blocking_even_with_many_open_files():
    """select() supports only the first 1,024 file descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    ours, servers = socket.socketpair()
    with ours, servers, socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD, 1024)) as high:
        polled_before_and_after_a_message(high, servers)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_session_is_polled_where_there_is_no_poll(monkeypatch):
    monkeypatch.delattr(select, "poll")
    ours, servers = socket.socketpair()
    with ours, servers:
        polled_before_and_after_a_message(ours, servers)


def polled_before_and_after_a_message(session, server):
    driver = SimpleNamespace(pgconn=SimpleNamespace(socket=session.fileno()))
    assert merged.is_silent(driver)
    server.send(b"the session has ended")
    assert not merged.is_silent(driver)


class InterruptedWhileAdaptedOnce:
    """A parameter. A signal arrives while it is adapted for the first time."""


@pytest.mark.usefixtures("_refusals")
def test_a_signal_before_the_first_statement_is_sent_is_not_lost(interrupt):
    from psycopg.adapt import Dumper

    class InterruptingDumper(Dumper):
        is_first = True

        def dump(self, obj):
            if InterruptingDumper.is_first:
                InterruptingDumper.is_first = False
                interrupt(InterruptedByTestError())
            return b"1"

    def handler():
        return execute("SELECT %s", InterruptedWhileAdaptedOnce())

    connection.close()
    connection.ensure_connection()
    connection.connection.adapters.register_dumper(InterruptedWhileAdaptedOnce, InterruptingDumper)
    assert play(handler) == [["InterruptedByTestError", None]]
    assert record().status == "recoverable"
    assert play(handler)[0] is False
    connection.close()
