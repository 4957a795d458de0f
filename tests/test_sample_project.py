"""The sample project: the effects of each endpoint for one caller, and no server error for any input."""

import json
from io import StringIO
from typing import Any, NamedTuple

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command

from testproject.models import Charge, Notification, Payout, Transfer, UnprotectedCharge
from tests.factories import UserFactory
from tests.http.callers import Caller

# The sample's code doesn't depend on the database.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]

CHARGE = {"amount": 1000, "currency": "usd", "label": "order-1"}
TRANSFER = {"recipient": "bob", "amount": 5, "label": "rent"}
PAYOUT = {"amount": 1000, "label": "wages"}
ORDER = {"amount": 1234, "label": "order-1"}
NOTIFICATION = {"recipient": "bob", "message": "Hello", "label": "greeting"}


class Endpoint(NamedTuple):
    path: str
    payload: dict[str, Any]
    effects: Any


CHARGED, UNPROTECTED = Charge.objects, UnprotectedCharge.objects
CHARGES = [Endpoint("/charges/", CHARGE, CHARGED), Endpoint("/unprotected/charges/", CHARGE, UNPROTECTED)]
ENDPOINTS = [
    *CHARGES,
    *(Endpoint(f"/payouts/{kind}", PAYOUT, Payout.objects) for kind in ("", "reexecute/", "park/")),
    Endpoint("/payments/", PAYOUT, CHARGED),
    Endpoint("/transfers/", TRANSFER, Transfer.objects),
    Endpoint("/notifications/", NOTIFICATION, Notification.objects),
]
#: ``test_orders`` tests valid orders.
ORDERS = [Endpoint("/orders/", ORDER, CHARGED), Endpoint("/unprotected/orders/", ORDER, UNPROTECTED)]


def each(endpoints):
    return pytest.mark.parametrize("endpoint", endpoints, ids=[endpoint.path for endpoint in endpoints])


@pytest.fixture(autouse=True)
def _provider(providers, settings):
    settings.PROVIDER_URL = settings.DEDUPLICATING_PROVIDER_URL = providers[False].url


@pytest.fixture
def alice():
    return Caller(UserFactory(username="alice"))


@each(ENDPOINTS)
def test_a_retry_replays_the_first_response_unless_unprotected(alice, endpoint):
    first, retry = (alice.post(endpoint.path, endpoint.payload, key="k") for _ in range(2))
    assert (first.status_code, retry.status_code) == (201, 201), first.content
    assert "Idempotency-Replayed" not in first.headers
    effect = endpoint.effects.earliest("pk")
    assert (effect.account.username, effect.label) == ("alice", endpoint.payload["label"])
    assert json.loads(first.content)["id"] == effect.pk
    if "unprotected" in endpoint.path:
        assert endpoint.effects.count() == 2
    else:
        assert (retry.content, retry.headers["Idempotency-Replayed"]) == (first.content, "true")
        assert retry.headers.get("Location") == first.headers.get("Location")
        assert endpoint.effects.count() == 1


@each(CHARGES)
def test_a_charge_is_at_its_location_for_its_owner_only(alice, endpoint):
    created = alice.post(endpoint.path, endpoint.payload, key="k")
    location = created.headers["Location"]
    assert location.startswith(endpoint.path)
    bob = Caller(UserFactory())
    assert alice.get(location).content == created.content
    assert bob.get(location).status_code == 404
    assert [caller.get(endpoint.path).json()["count"] for caller in (alice, bob)] == [1, 0]


@each(CHARGES)
def test_a_declined_card_is_a_402_without_a_charge(alice, endpoint):
    response = alice.post(endpoint.path, {**endpoint.payload, "source": "declined"}, key="k")
    assert (response.status_code, response.json()["code"]) == (402, "card_declined")
    assert endpoint.effects.count() == 0


@each([*ENDPOINTS, *ORDERS])
def test_an_invalid_payload_is_a_400_without_an_effect(alice, endpoint):
    wrong, broken = {"amount": 0, "recipient": ""}, {"label": "\ud800"}
    for number, body in enumerate((b"{", b"[]", {}, endpoint.payload | wrong, endpoint.payload | broken)):
        assert alice.post(endpoint.path, body, key=f"k{number}").status_code == 400, body
    assert endpoint.effects.count() == 0


@each([*ENDPOINTS, *ORDERS])
def test_a_caller_without_a_valid_token_is_refused(endpoint):
    for sent in ("", "Token", "Token a b", "Token " + "0" * 40, "Token a\x00b", "Token é", "Basic YTpi"):
        refused = Caller(None).post(endpoint.path, endpoint.payload, key="k", headers={"Authorization": sent})
        assert refused.status_code == 401, sent
    assert endpoint.effects.count() == 0


def test_the_demo_users_are_created_once_and_their_tokens_printed():
    output = [StringIO(), StringIO()]
    for stream in output:
        call_command("create_demo_users", stdout=stream)
    assert output[0].getvalue() == output[1].getvalue()
    for user in User.objects.all():
        assert f"{user.username}: Authorization: Token {user.auth_token.key}\n" in output[0].getvalue()
    assert set(User.objects.values_list("username", flat=True)) == {"alice", "bob"}


def test_the_health_check_needs_no_authentication(client):
    assert json.loads(client.get("/health/").content) == {"status": "ok"}
