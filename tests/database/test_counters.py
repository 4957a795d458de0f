"""What is counted adds up over processes, costs a request nothing, and harms nobody when it goes wrong."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from asgiref.testing import ApplicationCommunicator
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.core.signals import request_finished
from django.db import OperationalError, connection, connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import AsyncClient, Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from idempotency import Operation, claims, idempotent, signals
from idempotency import counters as counters_module
from idempotency.counters import counters
from idempotency.models import IdempotencyCounter
from idempotency.scope import Scope
from idempotency.stats import stats
from tests.database import processes

pytestmark = pytest.mark.django_db(transaction=True)

operation = Operation("tests.counters")
SCOPE = Scope("1", operation.name, "k")

ALIAS = "default"
REQUEST_FINISHED = "idempotency.counters"


@pytest.fixture(autouse=True)
def _nothing_counted(db: None) -> Iterator[None]:
    counters.reset()
    IdempotencyCounter.objects.all().delete()  # which a worker of an earlier test may have written as it ended
    yield
    counters.reset()


def count(times: int = 1, event: Any = signals.claimed, of: Operation | None = operation) -> None:
    for _ in range(times):
        signals.announce(event, of, SCOPE, 1)


def written() -> dict[tuple[str, str], int]:
    return {(row.operation, row.event): row.total for row in IdempotencyCounter.objects.all()}


CLAIMED = (operation.name, "claimed")


# Writing


def test_what_was_counted_is_added_to_what_is_there() -> None:
    count(3)
    count(2, signals.replayed)
    counters.flush()
    assert written() == {CLAIMED: 3, (operation.name, "replayed"): 2}
    count(4)
    counters.flush()
    assert written() == {CLAIMED: 7, (operation.name, "replayed"): 2}


def test_what_is_written_and_what_is_not_yet_make_one_number() -> None:
    count(3)
    counters.flush()
    count(2)
    assert written() == {CLAIMED: 3}
    assert stats().claims.value == 5


def test_nothing_new_is_no_statement() -> None:
    count()
    counters.flush()
    with CaptureQueriesContext(connection) as captured:
        counters.flush()
    assert captured.captured_queries == []


def test_an_operation_that_the_process_does_not_know_has_no_name() -> None:
    signals.announce(signals.recovered, None, SCOPE, 1, status="completed")
    counters.flush()
    assert written() == {("", "recovered"): 1}


@pytest.mark.postgres
def test_one_statement_writes_any_number_of_counters() -> None:
    count(2)
    count(1, signals.completed)
    with CaptureQueriesContext(connection) as captured:
        counters.flush()
    assert [query["sql"].split()[0] for query in captured.captured_queries] == ["BEGIN", "SELECT", "INSERT", "COMMIT"]


def test_a_connection_is_left_open_or_closed_as_it_was() -> None:
    connection.ensure_connection()
    before = connection.connection
    count()
    counters.flush()
    assert connection.connection is before
    connection.close()
    count()
    counters.flush()
    assert connection.connection is None
    assert written() == {CLAIMED: 2}


def test_no_count_is_lost_between_many_that_write_the_same_counters_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, and for the first time: none of them may be refused, not even once."""
    monkeypatch.setattr(counters_module, "MAX_ROUNDS", 1)
    keys = [(f"tests.{number:02}", "claimed") for number in range(20)]
    together = threading.Barrier(4)
    errors: list[Exception] = []

    def add(own: list[tuple[str, str]]) -> None:
        try:
            for _ in range(10):
                together.wait(60)
                counters_module._add(ALIAS, dict.fromkeys(own, 1))
        except Exception as error:  # noqa: BLE001 - a thread's error is looked at below
            errors.append(error)
            together.abort()
        finally:
            connections.close_all()

    threads = [threading.Thread(target=add, args=(keys if number % 2 else keys[::-1],)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert written() == dict.fromkeys(keys, 40)


# Not writing


def test_a_flush_in_an_open_transaction_does_nothing() -> None:
    count()
    with transaction.atomic(), CaptureQueriesContext(connection) as captured:
        counters.flush()
    assert captured.captured_queries == []
    counters.flush()
    assert written() == {CLAIMED: 1}


def test_a_flush_in_a_transaction_that_has_lost_its_connection_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    count()
    with transaction.atomic():
        connection.close()
        counters.flush()
    assert caplog.records == []
    counters.flush()
    assert written() == {CLAIMED: 1}


def test_a_flush_in_a_transaction_without_atomic_does_nothing() -> None:
    count()
    connection.set_autocommit(False)
    try:
        counters.flush()
        connection.rollback()
    finally:
        connection.set_autocommit(True)
    assert written() == {}
    counters.flush()
    assert written() == {CLAIMED: 1}


def test_a_flush_in_the_thread_of_an_event_loop_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    count()

    async def flush() -> None:
        counters.flush()

    asyncio.run(flush())
    assert written() == {}
    assert caplog.records == []
    counters.flush()
    assert written() == {CLAIMED: 1}


def test_only_one_thread_flushes_at_a_time() -> None:
    count()
    with counters._flushing:
        counters.flush()
    assert written() == {}


def test_a_reader_does_not_wait_for_a_flush_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters_module, "READ_PATIENCE", 0.01)
    count(2)
    with counters._flushing:
        assert stats().claims.value == 2


def test_what_is_not_written_yet_belongs_to_the_database_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    count(2)
    assert counters.read(ALIAS) == {operation.name: {"claimed": 2}}
    monkeypatch.setattr(claims, "alias", lambda: "elsewhere")
    assert counters.read(ALIAS) == {}


def test_what_was_counted_in_a_test_database_is_not_written_to_the_one_that_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when a test runner has ended, and then the interpreter does."""
    count()
    with monkeypatch.context() as patch, CaptureQueriesContext(connection) as captured:
        patch.setitem(connection.settings_dict, "NAME", "nowhere")
        counters.flush()
    assert captured.captured_queries == []
    counters.flush()
    assert written() == {}
    count()
    counters.flush()
    assert written() == {CLAIMED: 1}


# Trouble


@contextmanager
def refusing(error: Callable[[], BaseException], times: int = 1000) -> Iterator[None]:
    """Let the database refuse the next ``times`` statements on counters."""
    left = times

    def refuse(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        nonlocal left
        if "idempotency_counter" in sql and left:
            left -= 1
            raise error()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(refuse):
        yield


def unreachable() -> OperationalError:
    return OperationalError("no route to host")


def deadlock() -> OperationalError:
    """As the driver of PostgreSQL gives it or, on the others, as that of MySQL does."""
    if connection.vendor != "postgresql":
        return OperationalError(1213, "Deadlock found")
    from psycopg import errors

    error = OperationalError("deadlock detected")
    error.__cause__ = errors.lookup("40P01")("deadlock detected")
    return error


def test_a_database_that_refuses_loses_nothing_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    count(2)
    with refusing(unreachable):
        counters.flush()
        count()
        counters.flush()
        assert [(record.name, record.levelno) for record in caplog.records] == [("idempotency", logging.WARNING)]
    assert written() == {}
    counters.flush()
    assert written() == {CLAIMED: 3}
    count()
    with refusing(unreachable):
        counters.flush()
    assert len(caplog.records) == 2  # it is news again
    assert stats().claims.value == 4


def test_a_failure_that_is_no_database_error_is_not_raised_either() -> None:
    count()
    with refusing(lambda: RuntimeError("a driver's")):
        counters.flush()
    counters.flush()
    assert written() == {CLAIMED: 1}


def test_an_interrupted_flush_loses_nothing() -> None:
    count()
    with refusing(KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        counters.flush()
    count()
    counters.flush()
    assert written() == {CLAIMED: 2}


def test_a_deadlock_is_tried_again_at_once(caplog: pytest.LogCaptureFixture) -> None:
    count()
    with refusing(deadlock, counters_module.MAX_ROUNDS - 1):
        counters.flush()
    assert written() == {CLAIMED: 1}
    assert caplog.records == []


def test_deadlock_upon_deadlock_is_a_failure() -> None:
    count()
    with refusing(deadlock):
        counters.flush()
    assert written() == {}
    counters.flush()
    assert written() == {CLAIMED: 1}


@pytest.mark.postgres
def test_a_lock_that_a_frozen_process_holds_is_not_waited_for_without_bound() -> None:
    count()
    counters.flush()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic():
            IdempotencyCounter.objects.update(total=0)
            held.set()
            done.wait(60)
            transaction.set_rollback(True)
        connections.close_all()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(60)
        count()
        counters.flush()
        assert not done.is_set()
    finally:
        done.set()
        thread.join()
    assert written() == {CLAIMED: 1}
    counters.flush()
    assert written() == {CLAIMED: 2}


# Requests


@csrf_exempt
@idempotent("tests.counters.view", account=lambda request: "1")
def create(request: HttpRequest) -> HttpResponse:
    return JsonResponse({}, status=201)


VIEW = ("tests.counters.view", "completed")


@pytest.fixture
def view(settings: Any) -> None:
    settings.ROOT_URLCONF = (path("", create),)


def make_due() -> None:
    """Let the last flush be as long ago as need be."""
    counters._due = 0.0


def answer(key: str = "k") -> Any:
    """A request as a WSGI server makes it, and its response, which the server closes when it has sent it."""
    environ = RequestFactory().post("/", {}, "application/json", headers={"Idempotency-Key": key}).environ
    response: Any = WSGIHandler()(environ, lambda status, headers: None)
    assert response.status_code == 201
    return response


def test_what_a_request_counted_is_written_when_its_response_was_sent(view: None) -> None:
    make_due()
    response = answer()
    assert written() == {}
    response.close()
    assert written() == {("tests.counters.view", "claimed"): 1, VIEW: 1}


def test_requests_write_once_in_a_while(view: None) -> None:
    answer("a").close()
    assert written() == {}  # the process hasn't run for long
    make_due()
    answer("b").close()
    assert written()[VIEW] == 2
    response = answer("c")
    with CaptureQueriesContext(connection) as captured:
        response.close()
    assert captured.captured_queries == []
    make_due()
    answer("d").close()
    assert written()[VIEW] == 4


def test_requests_that_count_nothing_write_nothing(view: None) -> None:
    answer("a").close()
    counters.flush()
    before = written()
    make_due()
    response = WSGIHandler()(RequestFactory().get("/").environ, lambda status, headers: None)
    with CaptureQueriesContext(connection) as captured:
        response.close()
    assert captured.captured_queries == []
    assert written() == before


def test_a_request_whose_database_fails_in_the_flush_has_been_answered(view: None) -> None:
    response = answer()
    make_due()
    with refusing(unreachable):
        response.close()
    assert written() == {}
    answer().close()
    assert written() == {}  # not tried again before its time
    make_due()
    answer().close()
    assert written()[VIEW] == 1


@pytest.mark.django_db
def test_nothing_is_written_in_a_test_case(view: None) -> None:
    assert connection.in_atomic_block
    assert Client().post("/", {}, "application/json", headers={"Idempotency-Key": "k"}).status_code == 201
    counters.flush()
    assert written() == {}
    assert stats().completions.value == 1


def test_what_test_clients_ask_for_is_not_written(view: None) -> None:
    """They are no servers: they close a response before they hand it over, where its statements may be counted."""
    make_due()
    headers = {"Idempotency-Key": "k"}
    assert Client().post("/", {}, content_type="application/json", headers=headers).status_code == 201

    async def post() -> Any:
        return await AsyncClient().post("/", {}, content_type="application/json", headers=headers)

    assert async_to_sync(post)()["Idempotency-Replayed"] == "true"
    assert written() == {}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """In which thread each write was made."""
    seen = []
    add = counters_module._add

    def noted(using: str, counts: Any) -> None:
        seen.append(threading.get_ident())
        add(using, counts)

    monkeypatch.setattr(counters_module, "_add", noted)
    return seen


@pytest.fixture
def left_open() -> Iterator[list[bool]]:
    """Whether each request left its thread's connection open, after all that Django and the package do at its end."""
    seen = []

    def look(**arguments: Any) -> None:
        seen.append(connection.connection is not None)

    # Django's own comes first, as it does outside of tests; its test clients move it to the end.
    request_finished.disconnect(dispatch_uid=REQUEST_FINISHED)
    request_finished.connect(counters._request_finished, weak=False, dispatch_uid=REQUEST_FINISHED)
    request_finished.connect(look)
    yield seen
    request_finished.disconnect(look)


def visit() -> None:
    """A request as an ASGI server makes it."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/",
        "query_string": b"",
        "headers": [(b"host", b"testserver"), (b"content-type", b"application/json"), (b"idempotency-key", b"k")],
    }

    async def run() -> None:
        communicator = ApplicationCommunicator(ASGIHandler(), scope)
        await communicator.send_input({"type": "http.request", "body": b"{}", "more_body": False})
        assert (await communicator.receive_output(30))["status"] == 201
        await communicator.receive_output(30)
        await communicator.wait(30)

    asyncio.run(run())


@pytest.fixture
def _closed_connections() -> Iterator[None]:
    """Each request under ASGI has a thread of its own, and a connection that would outlive it belongs to nobody."""
    before = connection.settings_dict["CONN_MAX_AGE"]
    connection.settings_dict["CONN_MAX_AGE"] = 0
    yield
    connection.settings_dict["CONN_MAX_AGE"] = before


@pytest.mark.usefixtures("_closed_connections")
def test_under_asgi_the_loop_is_not_blocked_and_no_connection_is_left(
    view: None, threads: list[int], left_open: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    make_due()
    visit()
    assert written()[VIEW] == 1
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
    assert left_open == [False]
    assert caplog.records == []


# Threads, forks, processes


@pytest.fixture
def _threads_take_turns() -> Iterator[None]:
    """Let the interpreter switch between threads wherever it may."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_take_turns")
def test_no_count_is_lost_between_threads() -> None:
    together = threading.Barrier(8)
    receive = counters._receiver("claimed")

    def count_many() -> None:
        together.wait(60)
        for _ in range(5000):
            receive(operation)

    threads = [threading.Thread(target=count_many) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counters.flush()
    assert written() == {CLAIMED: 40_000}


@pytest.mark.usefixtures("_threads_take_turns")
def test_no_count_is_lost_or_written_twice_while_others_count() -> None:
    """Threads count and flush at the same time, as those of a server do."""
    together = threading.Barrier(4)

    def work() -> None:
        together.wait(60)
        for _ in range(20):
            count(50)
            counters.flush()
        connections.close_all()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counters.flush()
    assert written() == {CLAIMED: 4000}


def test_a_forked_child_counts_from_nothing() -> None:
    count()
    reader, writer = os.pipe()
    with counters._lock, counters._flushing:  # as other threads may hold them at that moment
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            count(2)
            os.write(writer, str(counters._pending[CLAIMED]).encode())
            os._exit(0)
    assert os.read(reader, 10) == b"2"
    assert os.waitpid(pid, 0)[1] == 0
    os.close(reader)
    os.close(writer)
    assert counters._pending == {CLAIMED: 1}


PROCESS = """
import os, sys, django
django.setup()
from idempotency import Operation, signals
from idempotency.counters import counters
from idempotency.scope import Scope

operation = Operation("tests.counters")
scope = Scope("1", operation.name, "k")

def count(times):
    for _ in range(times):
        signals.announce(signals.claimed, operation, scope, 1)

"""


def tell(process: Any, line: str = "") -> None:
    process.stdin.write(line + "\n")
    process.stdin.flush()


def ends_well(process: Any) -> str:
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    return str(output)


def test_the_counts_of_processes_add_up_and_a_third_one_shows_them() -> None:
    running = [
        processes.start(PROCESS + "print('ready', flush=True); input(); count(int(sys.argv[1]))", times)
        for times in ("3", "4")
    ]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        tell(process)
    for process in running:
        ends_well(process)
    shown = ends_well(
        processes.start(
            "from django.core.management import execute_from_command_line as run; import sys; run(sys.argv)",
            "idempotency_stats",
            "--json",
        )
    )
    assert json.loads(shown)["claims"] == {"value": 7, "kind": "recent"}


def test_a_killed_process_takes_with_it_what_it_had_not_written() -> None:
    script = "count(2); counters.flush(); count(3); print('counted', flush=True); input()"
    process = processes.start(PROCESS + script)
    assert process.stdout is not None
    assert process.stdout.readline() == "counted\n"
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert written() == {CLAIMED: 2}


def test_a_forked_child_does_not_write_what_its_parent_counted() -> None:
    script = "count(2); pid = os.fork(); count(0 if pid else 5); pid and os.waitpid(pid, 0)"
    ends_well(processes.start(PROCESS + script))
    assert written() == {CLAIMED: 7}


def test_a_process_that_ends_without_its_database_says_so_once_and_ends_well() -> None:
    database = (
        "postgres://nobody@/nothing?host=/nowhere" if connection.vendor == "postgresql" else "sqlite:////no/where"
    )
    process = processes.start(PROCESS + "count(2)", env={"DATABASE_URL": database})
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors.count("What was counted could not be written yet") == 1


def test_a_counter_says_what_it_counts() -> None:
    assert str(IdempotencyCounter(operation="charges.create", event="claimed", total=3)) == "charges.create claimed: 3"
