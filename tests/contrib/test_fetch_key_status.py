"""A client that resumes asks first, with either library."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
import requests

from idempotency.contrib.httpx import IdempotentTransport, afetch_key_status
from idempotency.contrib.httpx import fetch_key_status as fetch_with_httpx
from idempotency.contrib.requests import IdempotentAdapter
from idempotency.contrib.requests import fetch_key_status as fetch_with_requests
from idempotency.contrib.retrying import KeyStatus
from tests.contrib.servers import Server, answer

DONE = (
    b'{"status": "completed", "response_status": 201, "created_at": "2026-11-22T10:00:00Z",'
    b' "completed_at": "2026-11-22T10:00:01.500000Z", "expires_at": "2026-11-25T10:00:01.500000Z"}'
)


def by_httpx(url: str) -> KeyStatus:
    with httpx.Client(transport=IdempotentTransport(), base_url=url) as client:
        return fetch_with_httpx(client, "/keys/charges/", '"k"')


def by_async_httpx(url: str) -> KeyStatus:
    async def fetch() -> KeyStatus:
        async with httpx.AsyncClient() as client:
            return await afetch_key_status(client, f"{url}/keys/charges/", '"k"')

    return asyncio.run(fetch())


def by_requests(url: str) -> KeyStatus:
    with requests.Session() as session:
        session.trust_env = False
        session.mount("http://", IdempotentAdapter())
        return fetch_with_requests(session, f"{url}/keys/charges/", '"k"')


@pytest.mark.parametrize(
    ("fetch", "error"),
    [
        (by_httpx, httpx.HTTPStatusError),
        (by_async_httpx, httpx.HTTPStatusError),
        (by_requests, requests.HTTPError),
    ],
    ids=["httpx", "async", "requests"],
)
def test_a_client_learns_what_has_become_of_its_key(
    server: Server, fetch: Callable[[str], KeyStatus], error: type[Exception]
) -> None:
    server.script = [
        answer(200, DONE),
        answer(200, b'{"status": "in_progress", "created_at": null}', retry_after="2"),
        answer(404),
        *[answer(200, wrong) for wrong in (b"<html>", b"[]", b'{"status": 1}')],
    ]
    told = fetch(server.url)
    at = datetime(2026, 11, 22, 10, tzinfo=UTC)
    assert told == KeyStatus(
        "completed",
        response_status=201,
        created_at=at,
        completed_at=at.replace(second=1, microsecond=500_000),
        expires_at=at.replace(day=25, second=1, microsecond=500_000),
    )
    assert fetch(server.url) == KeyStatus("in_progress", retry_after=2.0)
    with pytest.raises(error):
        fetch(server.url)
    for _ in range(3):
        with pytest.raises(ValueError, match=r"status of a key|Expecting value"):
            fetch(server.url)
    assert {(sent.method, sent.path, sent.key) for sent in server.requests} == {("GET", "/keys/charges/", '"k"')}


def test_the_times_of_a_server_may_have_any_offset(server: Server) -> None:
    body: Any = b'{"status": "completed", "created_at": "2026-11-22T11:00:00+01:00"}'
    server.script = [answer(200, body)]
    assert by_requests(server.url).created_at == datetime(2026, 11, 22, 10, tzinfo=UTC)
