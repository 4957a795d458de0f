"""The two pages about clients: their examples do what they say, and their tables are those of the code."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import fields
from types import SimpleNamespace

import pytest

from idempotency.contrib.retrying import RetryPolicy
from idempotency.models import IdempotencyRecord
from tests.contrib.servers import Server, answer, cut
from tests.docs.conftest import RunPage, post
from tests.docs.pages import text_of
from tests.factories import UserFactory


def test_the_clients_send_one_key_until_they_know(run_page: RunPage, server: Server, waits: list[float]) -> None:
    page = run_page("how-to/write-a-client.md")
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


def test_the_order_is_resumed_with_the_key_that_was_saved(run_page: RunPage, server: Server) -> None:
    page = run_page("how-to/write-a-client.md")
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
def test_the_card_is_charged_under_one_key_by_every_attempt(run_page: RunPage, server: Server) -> None:
    page = run_page("how-to/call-a-provider.md")
    page["provider"].base_url = server.url
    user = UserFactory()
    server.script = [cut] * page["policy"].attempts + [cut]
    answers = [post(page["charge_card"], {"amount": 5}, user=user) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [502, 201, 201]
    assert json.loads(answers[1].content) == {"id": 1}
    assert "Idempotency-Replayed" in answers[2]
    assert len(server.requests) == page["policy"].attempts + 2
    assert set(server.keys) == {str(IdempotencyRecord.objects.get().derive_key("provider.charge"))}


def test_the_table_of_the_policy_is_that_of_the_code() -> None:
    text = text_of("how-to/write-a-client.md")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text.partition("| `RetryPolicy` |")[2], re.MULTILINE)
    default = RetryPolicy()
    assert [name for name, _ in rows] == [field.name for field in fields(RetryPolicy)]
    for name, cell in rows:
        value, words = getattr(default, name), cell.replace("`", "").split(", ")
        assert {*words} == ({*map(str, value)} if isinstance(value, frozenset) else {str(value)}), name
