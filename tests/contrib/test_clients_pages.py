"""The two pages about clients: their examples do what they say, and their tables are those of the code."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from django.http import HttpResponse
from django.test import RequestFactory

pytest.importorskip("tenacity", reason="the clients' retry library, which this environment doesn't have")
pytest.importorskip("httpx", reason="the clients' library, which this environment doesn't have")
pytest.importorskip("requests", reason="the clients' library, which this environment doesn't have")

import httpx

from idempotency.contrib.httpx import IdempotentTransport
from idempotency.contrib.retrying import RetryPolicy
from idempotency.models import IdempotencyRecord
from tests.contrib.servers import Server, answer, cut
from tests.docs.pages import DOCS, blocks
from tests.factories import UserFactory
from tests.operations import forgetting_operations


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What every transport that is made from now on would have slept, in seconds."""
    waits: list[float] = []
    defaults = IdempotentTransport.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "sleep", waits.append)
    return waits


@pytest.fixture
def names(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Runs the Python of a page, and gives what it has defined."""
    clients: list[httpx.Client] = []

    def run(page: str) -> dict[str, Any]:
        defined: dict[str, Any] = {}
        for source in blocks(DOCS / page, "python"):
            module = ModuleType("example")
            if file := re.match(r"# (\w+)\.py\n", source):
                monkeypatch.setitem(sys.modules, file[1], module)
            exec(compile(source, page, "exec"), vars(module))
            defined.update(vars(module))
        clients.extend(client for client in defined.values() if isinstance(client, httpx.Client))
        return defined

    with forgetting_operations():
        yield run
    for client in clients:
        client.close()


def test_the_clients_send_one_key_until_they_know(names: Any, server: Server, waits: list[float]) -> None:
    page = names("clients.md")
    page["shop"].base_url = page["shop_async"].base_url = server.url
    server.script = [cut, answer(503), answer(201)]
    assert page["charge"](5).status_code == 201
    assert len(waits) == 2

    async def charge() -> int:
        async with page["shop_async"]:
            status: int = (await page["charge_async"](5)).status_code
            return status

    assert asyncio.run(charge()) == 201
    assert [request.path for request in server.requests] == ["/charges/"] * 4
    assert len(set(server.keys[:3])) == 1
    assert len(set(server.keys)) == 2


def test_the_order_is_resumed_with_the_key_that_was_saved(names: Any, server: Server) -> None:
    page = names("clients.md")
    page["shop"].base_url = server.url
    saved: list[str] = []

    def save(*, update_fields: list[str]) -> None:
        assert update_fields == ["charge_key"]
        assert server.requests == []
        saved.append(order.charge_key)

    order = SimpleNamespace(charge_key="", amount=5, save=save)
    server.script = [cut] * 10
    assert page["pay"](order) is None
    assert page["pay"](order).status_code == 201
    assert server.keys == saved * 11


@pytest.mark.django_db
def test_the_card_is_charged_under_one_key_by_every_attempt(names: Any, server: Server) -> None:
    page = names("calling-a-provider.md")
    page["provider"].base_url = server.url
    user = UserFactory()

    def post() -> HttpResponse:
        payload = {"amount": 5}
        request = RequestFactory().post("/", payload, headers={"Idempotency-Key": "k"}, content_type="application/json")
        request.user = user
        response: HttpResponse = page["charge_card"](request)
        return response

    server.script = [cut] * page["policy"].attempts + [cut]
    answers = [post(), post(), post()]
    assert [answer.status_code for answer in answers] == [502, 201, 201]
    assert json.loads(answers[1].content) == {"id": 1}
    assert "Idempotency-Replayed" in answers[2]
    assert len(server.requests) == page["policy"].attempts + 2
    assert set(server.keys) == {str(IdempotencyRecord.objects.get().derive_key("provider.charge"))}


def test_the_table_of_the_policy_is_that_of_the_code() -> None:
    text = (DOCS / "clients.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text.partition("| `RetryPolicy` |")[2], re.MULTILINE)
    default = RetryPolicy()
    assert [name for name, _ in rows] == [field.name for field in fields(RetryPolicy)]
    for name, cell in rows:
        value, words = getattr(default, name), cell.replace("`", "").split(", ")
        assert {*words} == ({*map(str, value)} if isinstance(value, frozenset) else {str(value)}), name
