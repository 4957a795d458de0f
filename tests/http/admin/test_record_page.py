"""The page of a record says what is known of its state and what to do next, and offers just that."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from idempotency import PARK, Operation, Reconcile, Unknown
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from tests.http.admin.pages import LIST, charges, detail, hidden_fields, log_in, said, text
from tests.records import HOUR, make_records

# These pages show a row. The lists, which ask the database more, are tested on each one in ``test_records``.
pytestmark = [pytest.mark.django_db, pytest.mark.once]

parks = Operation("tests.admin.parks", transaction=False, recovery=PARK)
asks = Operation("tests.admin.asks", transaction=False, recovery=Reconcile(lambda record: Unknown()))

EVERY_ACTION = ["mark_not_executed", "record_outcome", "release"]


@pytest.fixture
def operator(client: Client) -> Client:
    log_in(client, "view_idempotencyrecord", "resolve_idempotencyrecord", "release_idempotencyrecord")
    return client


def record(status: Status, operation: str = charges.name, **fields: Any) -> int:
    (pk,) = make_records(1, status, **{"expires": HOUR, "operation": operation} | fields)
    return pk


def offered(page: Any) -> list[str]:
    """The actions whose buttons are on the page."""
    return re.findall(r'<button type="submit" class="button" name="action" value="(\w+)">', page.content.decode())


@pytest.mark.parametrize(
    ("fields", "told", "actions"),
    [
        ({"status": Status.COMPLETED}, "Every retry gets the recorded outcome until ", []),
        ({"status": Status.COMPLETED, "expires": -HOUR}, "Its retention ended at ", []),
        ({"status": Status.RECOVERABLE, "attempt": 3}, "Attempt 3 is known to have had no effect.", []),
        ({"status": Status.RECOVERABLE, "expires": -HOUR}, "The same key now makes a new request", []),
        (
            {"status": Status.IN_PROGRESS, "lease": HOUR, "attempt": 2},
            "Attempt 2 is presumed to be running until its lease ends at ",
            ["release"],
        ),
        (
            {"status": Status.IN_PROGRESS, "lease": -HOUR, "attempt": 2},
            "The lease of attempt 2 ended at ",
            ["release"],
        ),
        ({"status": Status.PARKED, "attempt": 4}, "Attempt 4 ended without a recorded outcome", EVERY_ACTION),
        ({"status": Status.PARKED}, "If it took effect, record its outcome.", EVERY_ACTION),
        ({"status": Status.PARKED, "expires": -HOUR}, "Its retention ended at ", EVERY_ACTION),
    ],
)
def test_the_page_says_what_is_known_and_offers_what_can_be_decided(
    operator: Client, fields: dict[str, Any], told: str, actions: list[str]
) -> None:
    page = operator.get(detail(record(**fields)))
    assert told in text(page)
    assert offered(page) == actions


@pytest.mark.parametrize(
    ("operation", "abandoned", "parked"),
    [
        (charges.name, "the next retry runs it again", "declares REEXECUTE now"),
        (asks.name, "declares a reconciler: the next retry or sweep asks it", "none of its answers settled"),
        (parks.name, "declares PARK: the next retry or sweep parks", "declares PARK, so it never runs again"),
        ("tests.admin.elsewhere", "No operation of this name is declared", "No operation of this name is declared"),
    ],
)
def test_what_comes_next_is_what_the_operation_declares(
    operator: Client, operation: str, abandoned: str, parked: str
) -> None:
    left = record(Status.IN_PROGRESS, operation, lease=-timedelta(minutes=3))
    assert abandoned in text(operator.get(detail(left)))
    assert parked in text(operator.get(detail(record(Status.PARKED, operation))))


def test_a_button_leads_to_the_decision_and_back_to_the_record(operator: Client) -> None:
    pk, other = record(Status.PARKED), record(Status.PARKED)
    question = operator.post(LIST, {"action": "release", **hidden_fields(operator.get(detail(pk)))})
    assert f'href="{detail(pk)}" class="closelink"' in question.content.decode()
    again = operator.post(LIST, {**hidden_fields(question), "reason": ""})
    answer = operator.post(LIST, {**hidden_fields(again), "reason": "asked"}, follow=True)
    assert answer.redirect_chain == [(detail(pk), 302)]
    assert said(answer)[0].endswith(": 1 idempotency record.")
    assert IdempotencyRecord.objects.get(pk=other).status == Status.PARKED
    IdempotencyRecord.objects.all().delete()
    answer = operator.post(LIST, {**hidden_fields(question), "reason": "asked"}, follow=True)
    assert answer.redirect_chain == [(LIST, 302)]
    assert said(answer) == [f"Idempotency record {pk} is gone: it was purged."]


@pytest.mark.parametrize(
    ("permissions", "actions"),
    [
        ([], []),
        (["resolve_idempotencyrecord"], ["mark_not_executed", "record_outcome"]),
        (["release_idempotencyrecord"], ["release"]),
    ],
)
def test_a_button_is_offered_to_the_permitted_only(client: Client, permissions: list[str], actions: list[str]) -> None:
    log_in(client, "view_idempotencyrecord", *permissions)
    page = client.get(detail(record(Status.PARKED)))
    assert offered(page) == actions
    assert "ended without a recorded outcome" in text(page)


@pytest.mark.parametrize(
    ("fields", "badge", "label"),
    [
        ({"status": Status.COMPLETED}, "done", "completed, 201"),
        ({"status": Status.RECOVERABLE}, "waiting", "recoverable"),
        ({"status": Status.PARKED}, "stuck", "parked"),
        ({"status": Status.IN_PROGRESS, "lease": -HOUR}, "waiting", "in progress, lease over"),
        ({"status": Status.IN_PROGRESS, "lease": HOUR}, "plain", "in progress, lease running"),
    ],
)
def test_each_state_has_a_badge_of_its_own_words_and_colour(
    operator: Client, fields: dict[str, Any], badge: str, label: str
) -> None:
    shown = f'<span class="idempotency-state idempotency-{badge}">{label}</span>'
    pk = record(**fields)
    for page in (operator.get(LIST), operator.get(detail(pk))):
        assert shown in page.content.decode()
        assert "idempotency/admin.css" in page.content.decode()


def test_the_list_tells_of_attempts_and_leases_where_there_is_something_to_tell(operator: Client) -> None:
    record(Status.COMPLETED, account_id="alice")
    record(Status.IN_PROGRESS, lease=-timedelta(seconds=90), attempt=3, account_id="bob")
    rows = text(operator.get(LIST))
    assert re.search(rf"in progress, lease over attempt 3, over for 1 min \d+ s {charges.name} account bob", rows)
    assert f"completed, 201 {charges.name} account alice" in rows
