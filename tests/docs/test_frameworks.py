"""The examples for other frameworks: what they say of one effect holds."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import django
import pytest
from django.contrib.auth.models import AnonymousUser
from django.test import Client, RequestFactory

from idempotency.outbox.models import OutboxMessage
from testproject.models import Charge, Notification
from tests.docs.conftest import RunPage, post
from tests.factories import UserFactory

pytestmark = [pytest.mark.django_db, pytest.mark.once]

PAGE = "how-to/use-another-framework.md"
MUTATION = 'mutation { charge(amount: %d, currency: "usd") %s { id amount } }'


def test_the_ninja_route_takes_effect_once(run_page: RunPage, settings: Any) -> None:
    pytest.importorskip("ninja", reason="Django Ninja is not installed")
    UserFactory(pk=1)
    settings.ROOT_URLCONF = tuple(run_page(PAGE)["urlpatterns"])
    headers = {"Authorization": "Bearer alices-token", "Idempotency-Key": "k"}
    payload = {"amount": 5, "currency": "usd"}
    answers = [
        Client().post("/api/charges", payload, content_type="application/json", headers=headers) for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[1]["Idempotency-Replayed"] == "true"
    assert Charge.objects.count() == 1


def test_the_mutation_takes_effect_once(run_page: RunPage) -> None:
    pytest.importorskip("strawberry", reason="Strawberry is not installed")
    run_page(PAGE)
    schema = sys.modules["shop.strawberry_schema"].schema
    user: Any = UserFactory()

    def mutate(key: str | None, amount: int) -> Any:
        request = RequestFactory().post("/")
        request.user = user
        mutation = MUTATION % (amount, f'@idempotent(key: "{key}")' if key else "")
        return schema.execute_sync(mutation, context_value=SimpleNamespace(request=request))

    def code(result: Any) -> str:
        return str(result.errors[0].extensions["code"])

    first, retry = mutate("k", 5), mutate("k", 5)
    assert first.errors is None
    assert first.data == retry.data
    assert code(mutate("k", 6)) == "idempotency_key_reused"
    assert code(mutate(None, 5)) == "idempotency_key_invalid"
    user = AnonymousUser()
    assert code(mutate("k", 5)) == "idempotency_account_required"
    assert Charge.objects.count() == 1


@pytest.mark.parametrize("by", ["arguments", "request"])
def test_the_tool_of_an_agent_takes_effect_once(run_page: RunPage, by: str) -> None:
    run_page(PAGE)
    tool, user = sys.modules["shop.mcp_tools"].charge_tool, UserFactory()

    def call(meta: Any, amount: int = 5) -> Any:
        arguments = {"amount": amount, "currency": "usd"}
        if by == "request":
            return tool(user, arguments, meta)
        return tool(user, {**arguments, "meta": meta})

    first, retry = call({"idempotency_key": "k"}), call({"idempotency_key": "k"})
    assert first == retry == {"isError": False, "structuredContent": {"id": Charge.objects.get().pk}}
    for meta, amount, code in (({"idempotency_key": "k"}, 6, "key_reused"), ({}, 5, "key_invalid")):
        refused = call(meta, amount)
        assert (refused["isError"], refused["structuredContent"]["code"]) == (True, f"idempotency_{code}")
    assert Charge.objects.count() == 1


@pytest.mark.parametrize("deliveries", [1, 2])
def test_a_task_of_djangos_takes_effect_once(run_page: RunPage, settings: Any, deliveries: int) -> None:
    tasks = "django.tasks" if django.VERSION >= (6,) else "django_tasks"  # the package for older versions
    settings.TASKS = {"default": {"BACKEND": f"{tasks}.backends.immediate.ImmediateBackend"}}
    page = run_page("how-to/use-django-tasks.md")
    assert post(page["place_order"], {}).status_code == 201
    message = OutboxMessage.objects.get()
    assert message.sender == "shop.task_sender.send"
    for _ in range(deliveries):
        page["send"](message)
    assert json.loads(message.payload) == {"charge_id": Charge.objects.get().pk}
    assert Notification.objects.count() == 1
