"""When counts are written: periodically after a response or a task, without delaying it, and when a worker ends."""

import asyncio
import threading
from unittest.mock import Mock

import pytest
from asgiref.sync import async_to_sync
from asgiref.testing import ApplicationCommunicator
from celery.signals import task_postrun, worker_process_shutdown
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.core.signals import request_finished
from django.db import connection
from django.http import JsonResponse
from django.test import AsyncClient, AsyncRequestFactory, Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

import idempotency.contrib.celery  # noqa: F401 - connects its handlers
from idempotency import idempotent
from idempotency.contrib.dashboard.counting import counters
from tests.database.counters.counting import CLAIMED, count, refusing, unreachable, written

pytestmark = pytest.mark.django_db(transaction=True)

REQUEST_FINISHED = "idempotency.counters"


@csrf_exempt
@idempotent("tests.counters.view", account=lambda request: "1")
def create(request):
    return JsonResponse({}, status=201)


VIEW = ("tests.counters.view", "completed")


@pytest.fixture
def view(settings):
    settings.ROOT_URLCONF = (path("", create),)


def make_due():
    """Make the next flush due."""
    counters._due = 0.0


def answer(key="k"):
    """Make a request as a WSGI server does. The caller closes the response, as the server does after sending it."""
    environ = RequestFactory().post("/", {}, "application/json", headers={"Idempotency-Key": key}).environ
    response = WSGIHandler()(environ, lambda status, headers: None)
    assert response.status_code == 201
    return response


def test_requests_write_periodically(view):
    answer("a").close()
    assert written() == {}  # the first flush is not due yet
    make_due()
    response = answer("b")
    assert written() == {}  # the response is not sent yet
    response.close()
    assert written() == {("tests.counters.view", "claimed"): 2, VIEW: 2}
    response = answer("c")
    with CaptureQueriesContext(connection) as captured:
        response.close()
    assert captured.captured_queries == []
    make_due()
    answer("d").close()
    assert written()[VIEW] == 4


def test_a_failed_flush_raises_nothing_and_is_retried_when_due(view):
    response = answer()
    make_due()
    with refusing(unreachable):
        response.close()
    assert written() == {}
    answer().close()
    assert written() == {}  # not retried before it is due
    make_due()
    answer().close()
    assert written()[VIEW] == 1


@pytest.mark.django_db
def test_nothing_is_written_in_a_test_case(view):
    assert connection.in_atomic_block
    assert Client().post("/", {}, "application/json", headers={"Idempotency-Key": "k"}).status_code == 201
    counters.flush()
    assert written() == {}
    assert counters._pending[VIEW] == 1


def test_requests_of_test_clients_write_nothing(view):
    """Unlike servers, test clients close a response before returning it, and a test may count its statements."""
    make_due()
    request = {"content_type": "application/json", "headers": {"Idempotency-Key": "k"}}
    assert Client().post("/", {}, **request).status_code == 201
    assert async_to_sync(AsyncClient().post)("/", {}, **request)["Idempotency-Replayed"] == "true"
    assert written() == {}


@pytest.fixture
def left_open():
    """For each request, whether its thread's connection is open after the cleanup by Django and the package."""
    seen = []

    def look(**arguments):
        seen.append(connection.connection is not None)

    # Django's receiver runs first, as in production. Its test clients move it to the end.
    request_finished.disconnect(dispatch_uid=REQUEST_FINISHED)
    request_finished.connect(counters._request_finished, weak=False, dispatch_uid=REQUEST_FINISHED)
    request_finished.connect(look)
    yield seen
    request_finished.disconnect(look)


def visit():
    """Make a request as an ASGI server does."""
    scope = AsyncRequestFactory().post("/", {}, "application/json", headers={"Idempotency-Key": "k"}).scope

    async def run():
        communicator = ApplicationCommunicator(ASGIHandler(), scope)
        await communicator.send_input({"type": "http.request", "body": b"{}", "more_body": False})
        assert (await communicator.receive_output(30))["status"] == 201
        await communicator.receive_output(30)
        await communicator.wait(30)

    asyncio.run(run())


def test_under_asgi_the_loop_is_not_blocked_and_no_connection_is_left(view, left_open, caplog, monkeypatch):
    threads = []
    flush = counters.flush
    monkeypatch.setattr(counters, "flush", lambda: threads.append(threading.get_ident()) or flush())
    # Each request runs in a new thread, so a connection that outlives it would never be reused.
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", 0)
    make_due()
    visit()
    assert written()[VIEW] == 1
    (writer,) = threads
    assert writer != threading.get_ident()
    assert left_open == [False]
    assert [record for record in caplog.records if record.name != "asyncio"] == []  # asyncio reports slow callbacks


@pytest.mark.parametrize(
    ("due", "is_eager", "writes"),
    [(False, False, False), (True, False, True), (True, True, False)],
    ids=["not due yet", "due", "eager, left to its request"],
)
def test_a_worker_writes_its_counts_after_a_task_when_they_are_due(due, is_eager, writes):
    count()
    if due:
        make_due()
    task_postrun.send(sender=Mock(**{"request.is_eager": is_eager}))
    assert written() == ({CLAIMED: 1} if writes else {})


def test_a_child_process_that_ends_writes_its_remaining_counts():
    count()
    worker_process_shutdown.send(sender=None)
    assert written() == {CLAIMED: 1}
