"""Requests as an ASGI server hands them in: clients that go away, headers as raw bytes, several at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.handlers.asgi import ASGIHandler
from django.core.signals import request_started
from django.db import connection, connections
from django.http import HttpRequest
from django.test import AsyncRequestFactory
from django.urls import resolve

from idempotency import idempotent
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.protocol import faults
from tests.http.callers import Caller, effects, multipart
from tests.http.serving import OUTSIDE, Framework, Serve, policies
from tests.http.views import plain_answer, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _no_persistent_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request has a thread of its own, and a connection that would outlive it belongs to nobody."""
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", 0)


class Visit:
    """One request to the ASGI application. ``leaves`` is when its client goes away."""

    def __init__(self, caller: Caller, *headers: tuple[bytes, bytes], path: str = "/", **sent: Any) -> None:
        assert caller.token is not None
        self.leaves = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        sent = {"data": b"{}", "content_type": "application/json", **sent}
        authorization = {"Authorization": f"Token {caller.token.key}"}
        scope = AsyncRequestFactory().generic("POST", path, **sent, headers=authorization).scope
        others = [header for header in scope["headers"] if header[0] != b"content-length"]  # as a body in chunks
        self._scope = {**scope, "headers": [*others, *headers]}
        self._body = [{"type": "http.request", "body": sent["data"], "more_body": False}]

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


KEY = (b"idempotency-key", b"k")


async def happens(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 30)


class Slow:
    """A protected view that stands still before its effect, until it is told to go on."""

    def __init__(self, serve: Serve, answer: Callable[[HttpRequest], Any] = plain_answer, **policy: Any) -> None:
        self.entered, self.go_on = asyncio.Event(), asyncio.Event()

        @idempotent("tests.slow", **policy)
        async def view(request: HttpRequest) -> Any:
            if request.headers["Idempotency-Key"] != "fast":
                self.entered.set()
                await happens(self.go_on)
            return await sync_to_async(answer)(request)

        self.view = view
        serve(view)

    async def finish(self, task: asyncio.Task[None]) -> None:
        self.go_on.set()
        await asyncio.wait([task])

    async def visit_and_leave(self, caller: Caller) -> None:
        """A request whose client goes away while its view runs."""
        visit = Visit(caller, KEY)
        task = asyncio.create_task(visit.run())
        await happens(self.entered)
        visit.leaves.set()
        await turns()
        assert not task.done()  # it is waiting for the run
        await self.finish(task)
        assert task.exception() is None
        assert visit.sent == []  # there was nobody to send it to


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def visited(*visits: Visit) -> list[int]:
    async def one_by_one() -> list[int]:
        for visit in visits:
            await visit.run()
        return [visit.sent[0]["status"] for visit in visits]

    # asyncio's debug mode keeps the stack of every future, which makes dozens of visits three times as long.
    return asyncio.run(one_by_one(), debug=False)


@pytest.mark.failure_33
@policies
def test_a_run_whose_client_goes_away_ends_and_is_recorded(alice: Caller, serve: Serve, policy: Any) -> None:
    asyncio.run(Slow(serve, **policy).visit_and_leave(alice))
    assert effects() == 1
    assert alice.post(key="k")["Idempotency-Replayed"] == "true"
    assert effects() == 1


def test_a_claim_is_made_in_the_thread_whose_connections_django_closes(
    alice: Caller, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    monkeypatch.setitem(faults.fault_point, "claim.committed", lambda: threads.append(threading.get_ident()))
    slow = Slow(serve)
    slow.go_on.set()

    def note(**event: Any) -> None:
        threads.append(threading.get_ident())

    request_started.connect(note)  # until the function is gone, with the test
    assert visited(Visit(alice, KEY)) == [201]
    assert (len(threads), len(set(threads))) == (2, 1)


@pytest.mark.failure_33
@policies
@pytest.mark.parametrize("times", [1, 2])
def test_a_cancelled_async_view_ends_its_run_first(alice: Caller, serve: Serve, policy: Any, times: int) -> None:
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
        slow = Slow(serve, **policy)
        task = asyncio.create_task(call(slow.view))
        await happens(slow.entered)
        for _ in range(times):
            task.cancel()
            await turns()
        assert not task.done()
        await slow.finish(task)
        assert task.cancelled()  # passed on in the end

    asyncio.run(scenario())
    assert effects() == 1
    assert alice.post(key="k")["Idempotency-Replayed"] == "true"
    assert effects() == 1


@pytest.mark.failure_33
@policies
def test_a_failed_run_whose_client_has_gone_is_released(alice: Caller, serve: Serve, policy: Any) -> None:
    def fail(request: HttpRequest) -> None:
        raise ValueError

    asyncio.run(Slow(serve, fail, **policy).visit_and_leave(alice))
    assert IdempotencyRecord.objects.get().status == (Status.PARKED if policy else Status.RECOVERABLE)


@pytest.mark.failure_33
def test_a_client_that_goes_while_another_request_runs_disturbs_nobody(alice: Caller, serve: Serve) -> None:
    async def scenario() -> None:
        slow = Slow(serve, **OUTSIDE)
        leaving, staying = Visit(alice, KEY), Visit(alice, (b"idempotency-key", b"fast"))
        task = asyncio.create_task(leaving.run())
        await happens(slow.entered)
        leaving.leaves.set()
        await staying.run()  # not behind the first: each has a thread of its own
        await slow.finish(task)
        assert (leaving.sent, staying.sent[0]["status"]) == ([], 201)

    asyncio.run(scenario())
    assert effects() == IdempotencyRecord.objects.completed().count() == 2


@pytest.mark.failure_39
@pytest.mark.parametrize(
    ("size", "unprotected"), [(1_000, {200}), (3 * 1024 * 1024, {200, 400})], ids=["small", "above the limit of memory"]
)
def test_a_form_in_chunks_is_compared_by_its_bytes(
    alice: Caller, serve: Serve, size: int, unprotected: set[int]
) -> None:
    """Sent in chunks it has no Content-Length, and without one Django finds no parts in it.

    Django 5.2.0 has no limit for such a body. Later ones refuse it, as the unprotected view shows.
    """
    Framework("plain", serve).serve_twins(lambda request: {"files": len(request.FILES), "size": len(request.body)})

    def upload(content: bytes, path: str = "/") -> Visit:
        return Visit(alice, KEY, path=path, **multipart({"file": SimpleUploadedFile("name", content)}))

    visits = upload(size * b"a", "/twin/"), upload(size * b"a"), upload(size * b"a"), upload(size * b"b")
    twin, *protected = visited(*visits)
    assert twin in unprotected
    assert protected == ([400, 400, 400] if twin == 400 else [200, 200, 422])


@pytest.mark.failure_46
def test_a_body_in_chunks_is_compared_though_drf_takes_it_for_empty(alice: Caller, serve: Serve) -> None:
    def handler(request: Any) -> dict[str, Any]:
        work(request)
        return {"body": request.body.decode(), "data": request.data}

    Framework("drf", serve).serve(handler)
    bodies = b'{"a": 1}', b'{"a": 1}', b'{"a": 2}'
    assert visited(*(Visit(alice, KEY, data=body) for body in bodies)) == [200, 200, 422]
    assert effects() == 1


@pytest.mark.once
@pytest.mark.failure_40
def test_any_byte_in_a_header_is_taken_or_refused(alice: Caller, serve: Serve) -> None:
    """What is a key by its characters stands in ``tests/unit/test_keys.py``. This is the way of its bytes to there."""
    serve(idempotent("tests.plain")(plain_answer))
    tried = [*range(0x2E), *b";A[\\~", 0x7F, 0x80, 0x85, 0xA0, 0xC3, 0xE9, 0xFF]
    statuses = visited(*(Visit(alice, (b"idempotency-key", b"k" + bytes([byte]) + b"k")) for byte in tried))
    taken = {byte for byte, status in zip(tried, statuses, strict=True) if status == 201}
    assert set(statuses) == {201, 400}
    assert taken == {*range(0x21, 0x2E), *b"A[\\~"} - set(b'",')
    assert effects() == len(taken)
