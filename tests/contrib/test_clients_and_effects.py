"""Clients against the sample project, effects counted in the database; and as part of a protected operation."""

import asyncio
import contextvars
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import httpx
import pytest
from asgiref.sync import async_to_sync
from django.db.models import F
from django.http import JsonResponse
from django.test import RequestFactory
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from idempotency import REEXECUTE, Operation, claim, idempotent, require_claim
from idempotency.accounts import Fixed
from idempotency.contrib.httpx import AsyncIdempotentTransport, IdempotentTransport
from idempotency.exceptions import LeaseLostError
from idempotency.models import IdempotencyRecord
from idempotency.protocol.acquisition import retry_after
from testproject.models import Charge
from tests.concurrency.racing import elsewhere
from tests.contrib.senders import no_sleep
from tests.contrib.servers import answer, cut, pass_on, problem
from tests.factories import ChargeFactory, TokenFactory, UserFactory

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]


CHARGE = json.dumps({"amount": 1000, "currency": "usd"}).encode()


@pytest.fixture
def charge(sender, server):
    token = TokenFactory().key

    def charge(key=None):
        headers = {"Authorization": f"Token {token}", "Content-Type": "application/json"}
        return sender.send(
            server.url + "/charges/", CHARGE, headers={**headers, **({"Idempotency-Key": key} if key else {})}
        )

    return charge


def test_a_lost_answer_is_fetched_again_and_the_charge_made_once(charge, server, live_server):
    lose = pass_on(live_server.url, lose_answer=True)
    server.script = [cut, answer(503), lose, problem(409, "idempotency_in_progress"), lose, pass_on(live_server.url)]
    got = charge()
    assert (got.status, got.headers["Idempotency-Replayed"]) == (201, "true")
    assert json.loads(got.body)["id"] == Charge.objects.get().pk
    assert IdempotencyRecord.objects.get().idempotency_key == got.key


class CutOffError(Exception):
    """Ends an attempt, as a crash would."""


def attempt(work, *, ends=True, **policy):
    """One attempt at an operation, which does its work and is then cut off unless it ``ends``."""
    policy |= {"transaction": False, "recovery": REEXECUTE}
    with suppress(CutOffError), claim("tests.client", account_id="1", key="k", **policy):
        work()
        if not ends:
            raise CutOffError


def test_every_attempt_at_an_operation_sends_the_same_keys(sender, server):
    def work():
        sender.send(server.url + "/payouts?a=b", name="provider.payout")
        sender.send(server.url + "/mails")
        sender.send(server.url + "/mails?to=bob")
        sender.send(server.url + "/mails", method="PATCH")

    server.script = [cut, answer(503)]
    attempt(work, ends=False)
    attempt(work)
    first, second = server.keys[2:6], server.keys[6:]
    assert server.keys[:2] == [first[0]] * 2
    assert first == second
    assert len(set(first)) == 4
    record = IdempotencyRecord.objects.get()
    place = "http://127.0.0.1/mails"
    names = ["provider.payout", f"POST {place}", f"POST {place}#2", f"PATCH {place}"]
    assert first == [str(record.derive_key(name)) for name in names]


def test_a_service_with_max_key_age_runs_a_derived_key_once(sender, server, live_server, settings):
    @csrf_exempt
    @idempotent("tests.service", max_key_age=timedelta(days=1), account=Fixed("caller"))
    def pay(request):
        return JsonResponse({"id": ChargeFactory().pk}, status=201)

    settings.ROOT_URLCONF = (path("", pay),)
    answers = []

    def work():
        answers.append(sender.send(server.url + "/", name="provider.payout"))

    service = pass_on(live_server.url)
    server.script = [pass_on(live_server.url, lose_answer=True), service, service]
    attempt(work, ends=False)
    attempt(work)
    assert len(set(server.keys)) == 1
    assert [(got.status, got.headers.get("Idempotency-Replayed")) for got in answers] == [(201, "true")] * 2
    assert json.loads(answers[1].body)["id"] == Charge.objects.get().pk


def test_a_key_of_the_callers_own_is_kept_within_an_operation(sender, server):
    attempt(lambda: sender.send(server.url, headers={"Idempotency-Key": "mine"}, name="provider.payout"))
    assert server.keys == ["mine"]


def take_over():
    """Let another attempt own the record, and this one notice: what its heartbeat does, in a thread of its own."""
    running = require_claim()

    def notice():
        IdempotencyRecord.objects.update(attempt=F("attempt") + 1)
        with suppress(LeaseLostError):
            running.renew()

    return lambda: elsewhere(notice)


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "mine"}], ids=["derived key", "own key"])
def test_a_lost_lease_stops_the_call_before_it_is_made(sender, server, headers):
    def work():
        take_over()()
        sender.send(server.url, headers=headers)

    with pytest.raises(LeaseLostError):
        attempt(work)
    assert server.requests == []


def test_a_lost_lease_stops_the_retries(sender, server):
    def work():
        sender.meanwhile = take_over()
        sender.send(server.url)

    server.script = [cut] * 5
    with pytest.raises(LeaseLostError):
        attempt(work)
    assert len(server.requests) == 1


@pytest.mark.parametrize(("policy", "fits"), [({}, False), ({"heartbeat": timedelta(minutes=5)}, True)])
def test_a_call_gives_up_before_the_lease_does(sender, server, policy, fits):
    server.script = [answer(503, retry_after="40")]

    def work():
        if fits:
            assert sender.send(server.url).status == 201
        else:
            sender.give_up(server.url)

    attempt(work, lease=timedelta(seconds=30), **policy)
    assert len(sender.waits) == int(fits)


def test_an_async_view_sends_the_keys_of_its_claim(server):
    async def call(client, name):
        await client.post(server.url, extensions={"idempotency_name": name})

    @idempotent("tests.client.async", transaction=False, recovery=REEXECUTE)
    async def view(request):
        async with httpx.AsyncClient(transport=AsyncIdempotentTransport(sleep=no_sleep), timeout=30) as client:
            await asyncio.gather(call(client, "one"), call(client, "two"))
            status = (await client.post(server.url + "/unnamed")).status_code
        return JsonResponse({}, status=status)

    user = UserFactory()

    def post():
        request = RequestFactory().post("/", {}, headers={"Idempotency-Key": "k"}, content_type="application/json")
        request.user = user
        return async_to_sync(view)(request).status_code

    server.script = [cut, cut, cut, answer(201), answer(201), answer(500)]
    assert [post(), post(), post()] == [500, 201, 201]
    record = IdempotencyRecord.objects.get()
    names = ["one", "two", "POST http://127.0.0.1/unnamed"]
    assert set(server.keys) == {str(record.derive_key(name)) for name in names}
    assert len(server.requests) == 3 + 3 + 3


def test_a_thread_that_is_given_the_context_sends_the_keys_of_the_claim(sender, server):
    def work():
        context = contextvars.copy_context()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(context.run, sender.send, server.url, name="provider.payout").result()

    attempt(work)
    assert server.keys == [str(IdempotencyRecord.objects.get().derive_key("provider.payout"))]


def test_the_default_bounds_outlive_the_default_lease_of_a_killed_worker():
    """By the waits that the server asks for; nothing is slept."""
    operation = Operation("tests.client.killed")
    lease = operation.policy.lease.total_seconds()
    seconds = 0.0

    def serve(request):
        if seconds == 0:
            raise httpx.ReadError("The worker is killed.", request=request)
        if seconds >= lease:
            return httpx.Response(201)
        refusal = {"code": "idempotency_in_progress"}
        return httpx.Response(
            409, json=refusal, headers={"Retry-After": str(retry_after(lease - seconds, operation.policy))}
        )

    def sleep(wait):
        nonlocal seconds
        seconds += wait

    for _ in range(100):
        seconds = 0.0
        transport = IdempotentTransport(httpx.MockTransport(serve), sleep=sleep)
        assert transport.handle_request(httpx.Request("POST", "https://shop.test/")).status_code == 201
