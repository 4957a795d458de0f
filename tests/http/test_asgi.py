"""Requests from an ASGI server: clients that disconnect, headers as raw bytes, and the context of a view."""

import asyncio
import contextvars
import threading
from concurrent.futures import Future

import pytest
from asgiref.sync import AsyncToSync, ThreadSensitiveContext, iscoroutinefunction, sync_to_async
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.handlers.asgi import ASGIHandler
from django.core.signals import request_started
from django.db import connection, connections
from django.test import AsyncRequestFactory
from django.urls import resolve
from django.utils.decorators import sync_and_async_middleware
from django.utils.translation import trans_real as translation

from idempotency import current_claim, idempotent
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.protocol import faults
from idempotency.protocol.context import claim_in_context
from tests.http.callers import effects, multipart
from tests.http.serving import Framework, policies
from tests.http.views import plain_answer, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _no_persistent_connections(monkeypatch):
    """Each request has a separate thread, so no later request would reuse or close a persistent connection."""
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", 0)


class Visit:
    """One request to the ASGI application. Setting ``leaves`` disconnects its client."""

    def __init__(self, caller, *headers, path="/", **sent):
        self.leaves = asyncio.Event()
        self.sent = []
        sent = {"data": b"{}", "content_type": "application/json", **sent}
        authorization = {"Authorization": f"Token {caller.token.key}"}
        scope = AsyncRequestFactory().generic("POST", path, **sent, headers=authorization).scope
        others = [header for header in scope["headers"] if header[0] != b"content-length"]  # as for a chunked body
        self._scope = {**scope, "headers": [*others, *headers]}
        self._body = [{"type": "http.request", "body": sent["data"], "more_body": False}]

    async def run(self):
        async with ThreadSensitiveContext():
            try:
                await ASGIHandler().handle(self._scope, self._receive, self._send)
            finally:
                await sync_to_async(connections.close_all)()

    async def _receive(self):
        if self._body:
            return self._body.pop()
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        self.sent.append(message)


KEY = (b"idempotency-key", b"k")


async def happens(event):
    await asyncio.wait_for(event.wait(), 30)


async def call_directly(view, caller):
    """Call an async view in the current task, without Django's handler, which would wait for it."""
    request = AsyncRequestFactory().post("/", {}, "application/json", headers={"Idempotency-Key": "k"})
    request.user, request.resolver_match = caller.user, resolve("/")
    async with ThreadSensitiveContext():
        try:
            await view(request)
        finally:
            _look()
            await sync_to_async(connections.close_all)()


class Slow:
    """A protected view that waits for ``go_on`` before its effect."""

    def __init__(self, serve, answer=plain_answer, **policy):
        self.entered, self.go_on = asyncio.Event(), asyncio.Event()

        @idempotent("tests.slow", **policy)
        async def view(request):
            if request.headers["Idempotency-Key"] != "fast":
                self.entered.set()
                await happens(self.go_on)
            return await sync_to_async(answer)(request)

        self.view = view
        serve(view)

    async def finish(self, task):
        self.go_on.set()
        await asyncio.wait([task])

    async def visit_and_leave(self, caller):
        """Make a request whose client disconnects while its view runs."""
        visit = Visit(caller, KEY)
        task = asyncio.create_task(visit.run())
        await happens(self.entered)
        visit.leaves.set()
        await turns()
        assert not task.done()  # it waits for the run
        await self.finish(task)
        assert task.exception() is None
        assert visit.sent == []  # the client had disconnected


async def turns(count=20):
    for _ in range(count):
        await asyncio.sleep(0)


def visited(*visits):
    async def one_by_one():
        for visit in visits:
            await visit.run()
        return [visit.sent[0]["status"] for visit in visits]

    # asyncio's debug mode keeps the stack of every future, which makes dozens of visits three times slower.
    return asyncio.run(one_by_one(), debug=False)


@pytest.mark.failure_33
@policies
def test_a_run_whose_client_disconnects_is_recorded_or_released(alice, serve, policy):
    asyncio.run(Slow(serve, **policy).visit_and_leave(alice))
    assert effects() == 1
    assert alice.post(key="k")["Idempotency-Replayed"] == "true"
    assert effects() == 1
    IdempotencyRecord.objects.all().delete()
    asyncio.run(Slow(serve, lambda request: 1 / 0, **policy).visit_and_leave(alice))
    assert IdempotencyRecord.objects.get().status == (Status.PARKED if policy else Status.RECOVERABLE)


def test_a_claim_is_made_in_djangos_thread(alice, serve, monkeypatch):
    threads = []
    monkeypatch.setitem(faults.fault_point, "claim.committed", lambda: threads.append(threading.get_ident()))
    slow = Slow(serve)
    slow.go_on.set()

    def note(**event):
        threads.append(threading.get_ident())

    request_started.connect(note)  # weakly referenced, so it is disconnected after the test
    assert visited(Visit(alice, KEY)) == [201]
    assert (len(threads), len(set(threads))) == (2, 1)


@pytest.mark.failure_33
@policies
@pytest.mark.parametrize("times", [1, 2])
def test_a_cancelled_async_view_ends_its_run_and_keeps_its_context(alice, serve, monkeypatch, policy, times):
    """A server that shuts down cancels the view, and cancels it again if it keeps running."""
    monkeypatch.setattr(AsyncToSync, "main_wrap", _wake_after_the_copy)

    async def scenario():
        slow = Slow(serve, _answer, **policy)
        _come_from_above()
        task = asyncio.create_task(call_directly(slow.view, alice))
        await happens(slow.entered)
        for _ in range(times):
            task.cancel()
            await turns()
        assert not task.done()
        await slow.finish(task)
        assert task.cancelled()  # passed on after the run
        assert after == [("from the view", "de", None)]

    asyncio.run(scenario())
    assert effects() == 1
    assert alice.post(key="k")["Idempotency-Replayed"] == "true"
    assert effects() == 1


@pytest.mark.failure_39
@pytest.mark.parametrize(
    ("size", "unprotected"), [(1_000, {200}), (3 * 1024 * 1024, {200, 400})], ids=["small", "above the limit of memory"]
)
def test_a_chunked_form_is_compared_by_its_bytes(alice, serve, size, unprotected):
    """A chunked form has no Content-Length, and without one Django finds no parts in it.

    Django 5.2.0 has no limit for such a body. Later releases refuse it, as the unprotected view shows.
    """
    Framework("plain", serve).serve_twins(lambda request: {"files": len(request.FILES), "size": len(request.body)})

    def upload(content, path="/"):
        return Visit(alice, KEY, path=path, **multipart({"file": SimpleUploadedFile("name", content)}))

    visits = upload(size * b"a", "/twin/"), upload(size * b"a"), upload(size * b"a"), upload(size * b"b")
    twin, *protected = visited(*visits)
    assert twin in unprotected
    assert protected == ([400, 400, 400] if twin == 400 else [200, 200, 422])


@pytest.mark.failure_46
def test_a_chunked_body_that_drf_finds_empty_is_compared_by_its_bytes(alice, serve):
    def handler(request):
        work(request)
        return {"body": request.body.decode(), "data": request.data}

    Framework("drf", serve).serve(handler)
    bodies = b'{"a": 1}', b'{"a": 1}', b'{"a": 2}', b'{"a":1}'
    assert visited(*(Visit(alice, KEY, data=body) for body in bodies)) == [200, 200, 422, 422]
    assert effects() == 1


@pytest.mark.once
@pytest.mark.failure_40
def test_any_byte_in_a_header_is_accepted_or_refused(alice, serve):
    """``tests/unit/test_keys.py`` tests the characters of a key. This tests how its bytes are decoded."""
    serve(idempotent("tests.plain")(plain_answer))
    tried = [*range(0x2E), *b";A[\\~", 0x7F, 0x80, 0x85, 0xA0, 0xC3, 0xE9, 0xFF]
    statuses = visited(*(Visit(alice, (b"idempotency-key", b"k" + bytes([byte]) + b"k")) for byte in tried))
    accepted = {byte for byte, status in zip(tried, statuses, strict=True) if status == 201}
    assert set(statuses) == {201, 400}
    assert accepted == {*range(0x21, 0x2E), *b"A[\\~"} - set(b'",')
    assert effects() == len(accepted)


@pytest.mark.failure_115
@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "a key"])
@pytest.mark.parametrize("way", ["task", "callback"])
@policies
def test_a_task_that_outlives_its_async_view_still_works(alice, serve, policy, key, way):
    """Without a key it is as in an unprotected view. With one, only the claim and the transaction have ended."""
    over, tasks, found = asyncio.Event(), [], []

    async def afterwards(request, claim):
        await happens(over)
        found.extend([current_claim(), claim is not None and claim.is_running])
        await sync_to_async(work)(request)
        found.append(await sync_to_async(lambda: connection.in_atomic_block)())
        # The task keeps the context of its request, which has ended, and so another thread than visit().
        await sync_to_async(connections.close_all)()

    @serve
    @idempotent("tests.outlived", key_required=False, **policy)
    async def view(request):
        def start():
            tasks.append(asyncio.create_task(afterwards(request, current_claim())))

        assert (current_claim() is None) == (key is None)
        if way == "task":
            start()
        else:
            asyncio.get_running_loop().call_soon(start)
        return await sync_to_async(plain_answer)(request)

    async def visit():
        visit = Visit(alice, *([KEY] if key else []))
        async with ThreadSensitiveContext():
            await visit.run()
            over.set()
            await asyncio.wait_for(asyncio.gather(*tasks), 30)
        return visit.sent[0]["status"]

    # As in a server. Within AsyncToSync, the task's calls would go to the thread of the test instead.
    assert asyncio.run(visit()) == 201
    assert found == [None, False, False]
    assert effects() == 2


tenant = contextvars.ContextVar("tenant", default="none")
#: The context that the middleware found after each view.
after = []


@pytest.fixture(autouse=True)
def _leave_nothing_behind():
    token = tenant.set("none")
    yield
    tenant.reset(token)
    translation.deactivate()
    after.clear()


def _look():
    after.append((tenant.get(), translation.get_language(), claim_in_context.get()))


def _come_from_above():
    tenant.set("from above")
    translation.activate("en")


@sync_and_async_middleware
def looking(get_response):
    def middleware(request):
        _come_from_above()
        try:
            return get_response(request)
        finally:
            _look()

    async def async_middleware(request):
        _come_from_above()
        try:
            return await get_response(request)
        finally:
            _look()

    return async_middleware if iscoroutinefunction(get_response) else middleware


def _set(request):
    assert (tenant.get(), translation.get_language()) == ("from above", "en")
    tenant.set("from the view")
    translation.activate("de")
    if "crash" in request.GET:
        raise ValueError


def _answer(request):
    _set(request)
    return plain_answer(request)


async def _answer_async(request):
    _set(request)
    return await sync_to_async(plain_answer)(request)


async def _answer_in_a_thread(request):
    return await sync_to_async(_answer)(request)


async def _wake_after_the_copy(self, answer, *others, run=AsyncToSync.main_wrap):
    """asgiref may wake the waiting thread before it has copied the coroutine's context. This copies first."""
    awaited = Future()
    await run(self, awaited, *others)
    if error := awaited.exception():
        answer.set_exception(error)
    else:
        answer.set_result(awaited.result())


@policies
@pytest.mark.parametrize("view", [_answer, _answer_async, _answer_in_a_thread])
@pytest.mark.parametrize("query", ["", "?crash=1"])
def test_context_set_by_a_view_reaches_the_middleware_above(
    alice, serve, settings, monkeypatch, transport, policy, view, query
):
    monkeypatch.setattr(AsyncToSync, "main_wrap", _wake_after_the_copy)
    settings.MIDDLEWARE = [f"{__name__}.looking"]
    serve(idempotent("tests.context", **policy)(view), **{"twin/": view})
    for url in ("/twin/", "/"):
        after.clear()
        alice.post(f"{url}{query}", key="k")
        assert after == [("from the view", "de", None)]
    if not query:
        after.clear()
        assert alice.post(key="k")["Idempotency-Replayed"] == "true"
        assert after == [("from above", "en", None)]
