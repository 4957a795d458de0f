"""Requests as an ASGI server hands them in: clients that go away, headers as raw bytes, several at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.handlers.asgi import ASGIHandler
from django.db import connection, connections
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import AsyncRequestFactory
from django.test.client import encode_multipart
from django.urls import resolve
from rest_framework.decorators import api_view
from rest_framework.response import Response

from idempotency import PARK, idempotent
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.http.callers import Caller, Serve, effects
from tests.http.views import plain_answer, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _no_persistent_connections() -> Iterator[None]:
    """Each request has a thread of its own, and a connection that would outlive it belongs to nobody."""
    before = connection.settings_dict["CONN_MAX_AGE"]
    connection.settings_dict["CONN_MAX_AGE"] = 0
    yield
    connection.settings_dict["CONN_MAX_AGE"] = before


class Visit:
    """One request to the ASGI application. ``leaves`` is when its client goes away."""

    def __init__(
        self,
        caller: Caller,
        *headers: tuple[bytes, bytes],
        path: str = "/",
        body: bytes = b"{}",
        content_type: bytes = b"application/json",
    ) -> None:
        assert caller.token is not None
        self.leaves = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self._body: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [
                (b"host", b"testserver"),
                (b"content-type", content_type),
                (b"authorization", f"Token {caller.token.key}".encode()),
                *headers,
            ],
        }

    async def run(self) -> None:
        async with ThreadSensitiveContext():
            try:
                await ASGIHandler().handle(self._scope, self._receive, self._send)
            finally:
                await sync_to_async(connections.close_all)()

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return self._body.pop()
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status


KEY = (b"idempotency-key", b"k")
POLICIES: dict[str, dict[str, Any]] = {"in a transaction": {}, "outside": {"transaction": False, "recovery": PARK}}


async def happens(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 30)


def slow_view(policy: str) -> tuple[Any, asyncio.Event, asyncio.Event]:
    """A protected view that stands still before its effect: the view, when it does, and what it waits for."""
    entered, go_on = asyncio.Event(), asyncio.Event()

    @idempotent("tests.slow", **POLICIES[policy])
    async def view(request: HttpRequest) -> HttpResponse:
        entered.set()
        await happens(go_on)
        return await sync_to_async(plain_answer)(request)

    return view, entered, go_on


async def turns(count: int = 20) -> None:
    """Let the event loop deliver what is due."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.failure_mode(33)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_run_of_an_async_view_whose_client_goes_away_ends_and_is_recorded(
    alice: Caller, serve: Serve, policy: str
) -> None:
    async def scenario() -> Visit:
        view, entered, go_on = slow_view(policy)
        serve(view)
        visit = Visit(alice, KEY)
        task = asyncio.create_task(visit.run())
        await happens(entered)
        visit.leaves.set()
        await turns()
        assert not task.done()  # it is waiting for the run
        go_on.set()
        await asyncio.wait([task])
        assert task.exception() is None
        return visit

    visit = asyncio.run(scenario())
    assert visit.sent == []  # there was nobody to send it to
    assert effects() == 1
    assert IdempotencyRecord.objects.get().status == Status.COMPLETED
    replay = alice.post(key="k")
    assert replay.status_code == 201
    assert replay["Idempotency-Replayed"] == "true"
    assert effects() == 1


@pytest.mark.failure_mode(33)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("times", [1, 2])
def test_an_async_view_that_is_cancelled_ends_its_run_first(
    alice: Caller, serve: Serve, policy: str, times: int
) -> None:
    """Cancelled itself, as by a server that shuts down, and once more because it has not obeyed."""

    async def call(view: Any) -> None:
        request: Any = AsyncRequestFactory().post("/", {}, "application/json", headers={"Idempotency-Key": "k"})
        request.user = alice.user
        request.resolver_match = resolve("/")
        async with ThreadSensitiveContext():
            try:
                await view(request)
            finally:
                await sync_to_async(connections.close_all)()

    async def scenario() -> None:
        view, entered, go_on = slow_view(policy)
        serve(view)
        task = asyncio.create_task(call(view))
        await happens(entered)
        for _ in range(times):
            task.cancel()
            await turns()
        assert not task.done()
        go_on.set()
        await asyncio.wait([task])
        assert task.cancelled()  # passed on in the end

    asyncio.run(scenario())
    assert effects() == 1
    assert alice.post(key="k")["Idempotency-Replayed"] == "true"
    assert effects() == 1


@pytest.mark.failure_mode(33)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_that_fails_after_the_client_has_gone_is_released(alice: Caller, serve: Serve, policy: str) -> None:
    async def scenario() -> None:
        entered, go_on = asyncio.Event(), asyncio.Event()

        @idempotent("tests.slow", **POLICIES[policy])
        async def view(request: HttpRequest) -> HttpResponse:
            entered.set()
            await happens(go_on)
            raise ValueError

        serve(view)
        visit = Visit(alice, KEY)
        task = asyncio.create_task(visit.run())
        await happens(entered)
        visit.leaves.set()
        await turns()
        go_on.set()
        await asyncio.wait([task])
        assert task.exception() is None
        assert visit.sent == []

    asyncio.run(scenario())
    expected = Status.RECOVERABLE if policy == "in a transaction" else Status.PARKED
    assert IdempotencyRecord.objects.get().status == expected
    assert effects() == 0


@pytest.mark.failure_mode(33)
def test_a_client_that_goes_while_another_request_runs_disturbs_nobody(alice: Caller, serve: Serve) -> None:
    async def scenario() -> list[Visit]:
        entered, go_on = asyncio.Event(), asyncio.Event()

        @idempotent("tests.slow", transaction=False, recovery=PARK)
        async def view(request: HttpRequest) -> HttpResponse:
            if request.headers["Idempotency-Key"] == "slow":
                entered.set()
                await happens(go_on)
            return await sync_to_async(plain_answer)(request)

        serve(view)
        leaving, staying = Visit(alice, (b"idempotency-key", b"slow")), Visit(alice, (b"idempotency-key", b"fast"))
        task = asyncio.create_task(leaving.run())
        await happens(entered)
        leaving.leaves.set()
        await staying.run()  # not behind the first: each has a thread of its own
        go_on.set()
        await asyncio.wait([task])
        return [leaving, staying]

    leaving, staying = asyncio.run(scenario())
    assert leaving.sent == []
    assert staying.status == 201
    assert effects() == 2
    assert IdempotencyRecord.objects.completed().count() == 2


def test_an_async_view_keeps_one_transaction_over_several_threads_calls(alice: Caller, serve: Serve) -> None:
    async def scenario() -> Visit:
        @idempotent("tests.async")
        async def view(request: HttpRequest) -> HttpResponse:
            assert await sync_to_async(lambda: connection.in_atomic_block)()
            await Transfer.objects.acreate(account_id=request.user.pk, recipient="a", amount=1)
            assert await Transfer.objects.acount() == 1
            await Transfer.objects.acreate(account_id=request.user.pk, recipient="b", amount=1)
            return JsonResponse({}, status=503)

        serve(view)
        visit = Visit(alice, KEY)
        await visit.run()
        return visit

    assert asyncio.run(scenario()).status == 503
    assert effects() == 0
    assert IdempotencyRecord.objects.get().status == Status.RECOVERABLE


@pytest.mark.failure_mode(39)
@pytest.mark.parametrize(
    ("size", "expected"),
    [(1_000, [200, 200, 200, 422]), (3 * 1024 * 1024, [400, 400, 400, 400])],
    ids=["small", "above the limit of memory"],
)
def test_a_multipart_body_in_chunks_is_compared_by_its_bytes(
    alice: Caller, serve: Serve, size: int, expected: list[int]
) -> None:
    """Sent in chunks it has no Content-Length, and without one Django finds no parts in it."""

    def handler(request: HttpRequest) -> HttpResponse:
        return JsonResponse({"parts": len(request.FILES), "size": len(request.body)})

    serve(idempotent("tests.chunked")(handler), **{"twin/": handler})

    def upload(content: bytes, path: str = "/") -> Visit:
        body = encode_multipart("one", {"file": SimpleUploadedFile("name", content)})
        return Visit(alice, KEY, path=path, body=body, content_type=b"multipart/form-data; boundary=one")

    async def scenario() -> list[int]:
        visits = [upload(size * b"a", "/twin/"), upload(size * b"a"), upload(size * b"a"), upload(size * b"b")]
        for visit in visits:
            await visit.run()
        return [visit.status for visit in visits]

    assert asyncio.run(scenario()) == expected


@pytest.mark.failure_mode(46)
def test_a_body_in_chunks_is_compared_though_drf_takes_it_for_empty(alice: Caller, serve: Serve) -> None:
    @api_view(["POST"])
    @idempotent("tests.chunked_drf")
    def view(request: Any) -> Response:
        work(request)
        return Response({"body": request.body.decode(), "data": request.data})

    serve(view)

    async def scenario() -> list[int]:
        visits = [Visit(alice, KEY, body=body) for body in (b'{"a": 1}', b'{"a": 1}', b'{"a": 2}')]
        for visit in visits:
            await visit.run()
        return [visit.status for visit in visits]

    assert asyncio.run(scenario()) == [200, 200, 422]
    assert effects() == 1


@pytest.mark.failure_mode(40)
def test_a_header_sent_twice_is_refused(alice: Caller, serve: Serve) -> None:
    async def scenario() -> Visit:
        serve(idempotent("tests.plain")(plain_answer))
        visit = Visit(alice, (b"idempotency-key", b"a"), (b"idempotency-key", b"b"))
        await visit.run()
        return visit

    assert asyncio.run(scenario()).status == 400
    assert effects() == 0


@pytest.mark.failure_mode(40)
def test_a_header_with_an_underscore_is_no_key(alice: Caller, serve: Serve) -> None:
    """Servers drop it, since it could be passed off as the other one. Django's ASGI handler does from 5.2.8 on."""

    async def scenario() -> Visit:
        serve(idempotent("tests.plain")(plain_answer))
        visit = Visit(alice, (b"idempotency_key", b"k"))
        await visit.run()
        return visit

    visit = asyncio.run(scenario())
    assert visit.status in {201, 400}
    assert effects() == (1 if visit.status == 201 else 0)


@pytest.mark.failure_mode(40)
def test_every_byte_in_a_header_is_taken_or_refused(alice: Caller, serve: Serve) -> None:
    async def scenario() -> dict[int, int]:
        serve(idempotent("tests.plain")(plain_answer))
        statuses = {}
        for byte in range(256):
            visit = Visit(alice, (b"idempotency-key", b"k" + bytes([byte]) + b"k"))
            await visit.run()
            statuses[byte] = visit.status
        return statuses

    statuses = asyncio.run(scenario())
    taken = {byte for byte, status in statuses.items() if status == 201}
    assert set(statuses.values()) == {201, 400}
    assert taken == set(range(0x21, 0x7F)) - set(b'",;')
    assert effects() == len(taken)
