"""The page about introducing the protection and switching it off: the emergency follows the page's steps."""

import sys
from inspect import unwrap

import pytest
from django.core.exceptions import MiddlewareNotUsed
from django.db import connection
from django.test import Client, override_settings
from django.urls import path

from idempotency import idempotent
from testproject.models import Transfer
from tests.docs.pages import blocks
from tests.factories import UserFactory

pytestmark = [pytest.mark.django_db, pytest.mark.once]

PAGE = "how-to/introduce.md"
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
]


def rename(table, other):
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {connection.ops.quote_name(table)} RENAME TO {connection.ops.quote_name(other)}")


@pytest.fixture
def shop(run_page, settings):
    """Return a function that requests a view under the page's operation, or with a required key, under its settings."""
    view = unwrap(run_page("how-to/protect-a-view.md")["create_transfer"])
    optional = idempotent(run_page(PAGE)["create_transfer"].operation)(view)
    required = idempotent("docs.required")(view)
    moves_money = idempotent("docs.moves_money", key_required=True)(view)
    settings.ROOT_URLCONF = (
        path("transfers/optional/", optional),
        path("transfers/", required),
        path("payouts/", moves_money),
    )
    [written] = [block for block in blocks(PAGE, "python") if block.startswith("# settings.py")]
    user = UserFactory()

    def send(key=None, url="/transfers/"):
        names = {}
        exec(written, names)
        changed = {"IDEMPOTENCY": names["IDEMPOTENCY"], "MIDDLEWARE": [*names["MIDDLEWARE"], *MIDDLEWARE]}
        with override_settings(**changed):
            client = Client()
            client.force_login(user)
            headers = {} if key is None else {"Idempotency-Key": key}
            payload = {"recipient": "carol", "amount": 5}
            return client.post(url, payload, content_type="application/json", headers=headers)

    return send


@pytest.mark.parametrize("key", [None, "k"])
def test_a_request_without_an_optional_key_runs_each_time(shop, key):
    assert [shop(key, "/transfers/optional/").status_code for _ in range(2)] == [201, 201]
    assert Transfer.objects.count() == (2 if key is None else 1)


def test_the_emergency_switch_works_as_the_page_describes(shop, monkeypatch):
    assert [shop("before").status_code, shop().status_code] == [201, 400]
    rename("idempotency_record", "idempotency_record_broken")
    assert shop("during").status_code == 503
    assert Transfer.objects.count() == 1

    monkeypatch.setenv("IDEMPOTENCY_OFF", "1")
    answers = [shop("during"), shop("during"), shop("before")]
    assert [(answer.status_code, answer["Idempotency-Status"]) for answer in answers] == [(201, "ignored")] * 3
    assert shop().status_code == 201
    assert [shop(key, "/payouts/").status_code for key in ("during", None)] == [503, 400]
    assert Transfer.objects.count() == 5

    rename("idempotency_record_broken", "idempotency_record")
    monkeypatch.delenv("IDEMPOTENCY_OFF")
    assert shop("before")["Idempotency-Status"] == "replayed"
    assert [shop("during")["Idempotency-Status"] for _ in range(2)] == ["executed", "replayed"]
    assert Transfer.objects.count() == 6


def test_other_paths_stay_protected_in_the_emergency(run_page, monkeypatch, rf):
    run_page(PAGE)
    make = sys.modules["shop.emergency"].run_unprotected
    with pytest.raises(MiddlewareNotUsed):
        make(None)
    monkeypatch.setenv("IDEMPOTENCY_OFF", "1")
    kept = make(lambda request: {"key": request.META.get("HTTP_IDEMPOTENCY_KEY")})
    headers = {"Idempotency-Key": "k"}
    assert kept(rf.post("/cards/", headers=headers)) == {"key": "k"}
    assert kept(rf.post("/transfers/", headers=headers)) == {"key": None, "Idempotency-Status": "ignored"}
