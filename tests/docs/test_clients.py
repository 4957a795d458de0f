"""The clients that a page shows, against a server that fails in every way: one key and one body until they know."""

import json
import sys
import time
from functools import partial
from types import SimpleNamespace
from uuid import UUID

import httpx
import pytest
import requests
from django.http import JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from idempotency import PARK, Operation, idempotent
from idempotency.accounts import Fixed
from idempotency.protocol.decisions import retry_after
from idempotency.testing import abandoned, completed, in_progress
from testproject.models import Charge
from tests.docs.servers import answer, cut, pass_on
from tests.factories import ChargeFactory

pytestmark = [pytest.mark.django_db, pytest.mark.once]

PAGE = "how-to/write-a-client.md"
PAYLOAD = {"amount": 5, "currency": "usd"}


class Waits(list):
    """The seconds that a client would have slept, and what happens during the wait after so many requests."""

    def __init__(self, server):
        super().__init__()
        self.server = server
        self.after = {}

    def sleep(self, seconds):
        self.append(seconds)
        if (happens := self.after.get(len(self.server.requests))) is not None:
            happens()


@pytest.fixture
def waits(server, monkeypatch):
    waits = Waits(server)
    monkeypatch.setattr("urllib3.util.retry.time", SimpleNamespace(sleep=waits.sleep, time=time.time))
    return waits


@pytest.fixture(params=["shop_api", "shop_api_httpx"])
def client(request, run_page, waits, monkeypatch):
    run_page(PAGE)
    monkeypatch.setattr(sys.modules["shop_api_httpx"], "sleep", waits.sleep)
    reach_loopback(sys.modules["shop_api"].session)
    return sys.modules[request.param]


def reach_loopback(session):
    session.trust_env = False
    session.mount("http://", session.get_adapter("https://"))


def send(client, server, **payload):
    return client.post(f"{server.url}/charges/", {**PAYLOAD, **payload}, "order-71")


UNAVAILABLE = answer(503, retry_after="1")
RETRIED = {
    "cut": cut,
    "in progress": answer(409, retry_after="1"),
    "throttled": answer(429, retry_after="1"),
    "unavailable": UNAVAILABLE,
    **{f"{status} of a proxy": answer(status, b"<html>") for status in (408, 425, 429, 502, 503, 504)},
}


@pytest.mark.parametrize("fault", RETRIED.values(), ids=RETRIED)
def test_what_settles_nothing_is_retried_with_the_same_key_and_body(client, server, fault):
    server.script = [fault, fault]
    assert send(client, server).status_code == 201
    bodies = {request.body for request in server.requests}
    assert (server.keys, [json.loads(body) for body in bodies]) == (["order-71"] * 3, [PAYLOAD])


@pytest.mark.parametrize("status", [200, 201, 202, 400, 401, 402, 403, 404, 409, 422, 500])
def test_every_other_answer_is_returned(client, server, waits, status):
    server.script = [answer(status)]
    assert send(client, server).status_code == status
    assert (len(server.requests), waits) == (1, [])


def test_the_waits_are_those_that_the_server_requires(client, server, waits):
    server.script = [answer(409, retry_after="7"), answer(503, retry_after="30")]
    send(client, server)
    assert [first <= wait <= first + 2 for first, wait in zip((7, 30), waits, strict=True)] == [True, True]


@pytest.mark.parametrize("asked", ["86400", "9" * 30])
@pytest.mark.parametrize("status", [409, 429, 503])
def test_no_wait_is_longer_than_a_minute(client, server, waits, status, asked):
    server.script = [answer(status, retry_after=asked)]
    assert send(client, server).status_code == 201
    assert 60 <= waits[0] <= 62


def test_a_client_gives_up_with_the_last_response_or_error(client, server):
    server.script = [cut] * 10
    with pytest.raises((httpx.TransportError, requests.RequestException)):
        send(client, server)
    server.script = [answer(409, retry_after="1")] * 10
    assert send(client, server).status_code == 409
    assert server.keys == ["order-71"] * 20


def test_a_client_outlasts_the_default_lease_of_a_killed_worker(client, server, waits):
    """Measured by the waits that the server requires, without sleeping."""
    policy = Operation.declare("docs.client.killed").policy

    def take_over(handler):
        left = policy.lease.total_seconds() - sum(waits)
        required = str(retry_after(left, policy))
        (answer(409, retry_after=required) if left > 0 else answer(201))(handler)

    server.script = [cut, *[take_over] * 9]
    assert send(client, server).status_code == 201


@pytest.fixture
def serve(settings, server, live_server):
    """Serves a protected view on a socket, behind a server that loses the answer to the first request."""

    def serve(**policy):
        @csrf_exempt
        @idempotent("docs.client", account=Fixed("caller"), **policy)
        def charge(request):
            return JsonResponse({"id": ChargeFactory().pk}, status=201)

        settings.ROOT_URLCONF = (path("charges/", charge),)
        server.script = [pass_on(live_server.url, lose_answer=True), *[pass_on(live_server.url)] * 3]

    return serve


@pytest.mark.django_db(transaction=True)
def test_a_client_gets_the_replay_of_the_answer_that_it_lost(client, server, serve):
    serve()
    got = send(client, server)
    assert (got.status_code, got.headers["Idempotency-Replayed"]) == (201, "true")
    assert got.json() == {"id": Charge.objects.get().pk}
    assert send(client, server, amount=6).status_code == 422
    assert len(server.requests) == 3


@pytest.mark.django_db(transaction=True)
def test_a_client_waits_for_another_attempt(client, server, serve, waits):
    serve()
    server.script.insert(1, UNAVAILABLE)
    waits.after = {
        2: lambda: in_progress("order-71"),
        3: lambda: completed("order-71", JsonResponse({"id": 7}, status=201)),
    }
    assert send(client, server).json() == {"id": 7}
    assert len(server.requests) == 4


@pytest.mark.django_db(transaction=True)
def test_a_client_leaves_an_unknown_outcome_to_a_person(client, server, serve, waits):
    serve(transaction=False, recovery=PARK)
    server.script.insert(1, UNAVAILABLE)
    waits.after = {2: lambda: abandoned("order-71")}
    got = send(client, server)
    assert (got.status_code, got.json()["code"]) == (409, "idempotency_outcome_unknown")
    assert len(server.requests) == 3


def test_the_order_is_resumed_with_the_key_that_was_saved(run_page, server, waits, monkeypatch):
    page = run_page(PAGE)
    to_server = partial(page["session"].post, f"{server.url}/charges/")
    monkeypatch.setattr(page["session"], "post", lambda url, **sent: to_server(**sent))
    reach_loopback(page["session"])
    saved = []

    def save(*, update_fields):
        assert update_fields == ["charge_key"]
        assert server.requests == []
        saved.append(order.charge_key)

    order = SimpleNamespace(charge_key="", amount=5, save=save)
    server.script = [*[cut] * 10, answer(401, idempotency_status="unknown"), answer(201, idempotency_status="executed")]
    assert [page["pay"](order) for _ in range(2)] == [None, None]
    assert page["pay"](order).status_code == 201
    assert server.keys == saved * 12
    assert UUID(saved[0]).version == 7
