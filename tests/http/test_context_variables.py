"""Context variables and the language: what a view sets reaches its middleware, as without protection."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import ThreadSensitiveContext, iscoroutinefunction, sync_to_async
from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.test import AsyncRequestFactory
from django.utils.decorators import sync_and_async_middleware
from django.utils.translation import trans_real as translation

from idempotency import idempotent
from idempotency.protocol.context import claim_in_context
from tests.http.callers import Caller
from tests.http.serving import Serve, policies
from tests.http.views import plain_answer

pytestmark = pytest.mark.django_db(transaction=True)

tenant = contextvars.ContextVar("tenant", default="nobody")
#: What the middleware found after the view.
after: list[tuple[str, str, Any]] = []


@pytest.fixture(autouse=True)
def _leave_nothing_behind() -> Iterator[None]:
    token = tenant.set("nobody")
    yield
    tenant.reset(token)
    translation.deactivate()
    after.clear()


def _look() -> None:
    after.append((tenant.get(), translation.get_language(), claim_in_context.get()))


def _come_from_above() -> None:
    tenant.set("from above")
    translation.activate("en")


@sync_and_async_middleware
def looking(get_response: Any) -> Any:
    def middleware(request: HttpRequest) -> Any:
        _come_from_above()
        try:
            return get_response(request)
        finally:
            _look()

    async def async_middleware(request: HttpRequest) -> Any:
        _come_from_above()
        try:
            return await get_response(request)
        finally:
            _look()

    return async_middleware if iscoroutinefunction(get_response) else middleware


def _set(request: HttpRequest) -> None:
    assert (tenant.get(), translation.get_language()) == ("from above", "en")
    tenant.set("from the view")
    translation.activate("de")
    if "crash" in request.GET:
        raise ValueError


def _answer(request: HttpRequest) -> HttpResponse:
    _set(request)
    return plain_answer(request)


async def _answer_async(request: HttpRequest) -> HttpResponse:
    _set(request)
    return await sync_to_async(plain_answer)(request)


async def _answer_in_a_thread(request: HttpRequest) -> HttpResponse:
    return await sync_to_async(_answer)(request)


@policies
@pytest.mark.parametrize("view", [_answer, _answer_async, _answer_in_a_thread])
@pytest.mark.parametrize("query", ["", "?crash=1"])
def test_what_a_view_sets_reaches_the_middleware_above(
    alice: Caller, serve: Serve, settings: Any, transport: str, policy: Any, view: Callable[..., Any], query: str
) -> None:
    settings.MIDDLEWARE = [f"{__name__}.looking"]
    alice.transport = transport
    serve(idempotent("tests.context", **policy)(view), **{"twin/": view})
    for url in ("/twin/", "/"):
        after.clear()
        alice.post(f"{url}{query}", key="k")
        assert after == [("from the view", "de", None)]
    if not query:
        after.clear()
        assert alice.post(key="k")["Idempotency-Replayed"] == "true"
        assert after == [("from above", "en", None)]


def test_what_a_cancelled_view_has_set_is_there_after_its_end(alice: Caller, serve: Serve) -> None:
    async def scenario() -> None:
        entered, go_on = asyncio.Event(), asyncio.Event()

        @idempotent("tests.cancelled")
        async def view(request: HttpRequest) -> HttpResponse:
            tenant.set("from the view")
            entered.set()
            await go_on.wait()
            return await sync_to_async(plain_answer)(request)

        async def call() -> None:
            request: Any = AsyncRequestFactory().post("/", {}, "application/json", headers={"Idempotency-Key": "k"})
            request.user = alice.user
            async with ThreadSensitiveContext():
                try:
                    await view(request)
                finally:
                    after.append((tenant.get(), "", claim_in_context.get()))
                    await sync_to_async(connections.close_all)()

        after.clear()
        task = asyncio.create_task(call())
        await asyncio.wait_for(entered.wait(), 30)
        task.cancel()
        go_on.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert after == [("from the view", "", None)]

    asyncio.run(scenario())
