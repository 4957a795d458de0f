"""Whatever a URL or a form of the admin contains, the admin answers it and never fails."""

import re

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.outbox.models import MessageStatus, OutboxMessage
from tests.http.admin.pages import LIST, ask, charges, detail, hidden_fields, log_in, text
from tests.outbox import make_messages
from tests.records import HOUR, make_records

pytestmark = pytest.mark.django_db

DASHBOARD = reverse("admin:idempotency_dashboard")
MESSAGES = reverse("admin:idempotency_outbox_outboxmessage_changelist")
LISTS = pytest.mark.parametrize("url", [LIST, MESSAGES], ids=["records", "messages"])

NUL = "a\0b"
TOO_LARGE = "9" * 30
DIGITS = "9" * 5_000
NOT_ASCII = "\u0663"
TOO_LONG = "x" * 256

OUTCOME = {"status": "201", "content_type": "application/json", "body": "{}", "reason": "asked the bank"}


@pytest.fixture
def operator(client):
    client.raise_request_exception = False
    return log_in(client, superuser=True)


def parked():
    (pk,) = make_records(1, Status.PARKED, expires=HOUR, operation=charges.name)
    return pk


def dead():
    (pk,) = make_messages(1, MessageStatus.DEAD)
    return pk


make = {LIST: parked, MESSAGES: dead}


@LISTS
@pytest.mark.parametrize(
    "name", ["q", "state", "operation", "account_id", "idempotency_key", "message_id", "o", "p", "e"]
)
@pytest.mark.parametrize("value", [NUL, TOO_LARGE, DIGITS, NOT_ASCII, "-1", "%"], ids=lambda value: ascii(value[:9]))
def test_a_list_answers_any_query(operator, url, name, value):
    make[url]()
    assert operator.get(url, {name: value}, follow=True).status_code in {200, 400}


@pytest.mark.parametrize("query", [{"account_id": TOO_LONG}, {"q": TOO_LONG}, {"q": f"{TOO_LONG} k"}], ids=str)
def test_the_database_gets_no_account_that_is_longer_than_its_column(operator, query):
    """Citus refuses such a statement."""
    with CaptureQueriesContext(connection) as statements:
        assert operator.get(LIST, query, follow=True).status_code == 200
    assert not [one["sql"] for one in statements if re.search(rf"account_id\W+=\W+{TOO_LONG}", one["sql"])]


@pytest.mark.parametrize("pk", ["x", "0", "-1", TOO_LARGE, DIGITS, "_00", "_ZZ"], ids=lambda value: ascii(value[:9]))
@pytest.mark.parametrize("model", ["idempotencyrecord", "outboxmessage"])
@pytest.mark.parametrize("view", ["change", "history"])
def test_a_page_of_no_row_leads_elsewhere(operator, view, model, pk):
    assert operator.get(detail(pk, view, model), follow=True).status_code == 200


@LISTS
@pytest.mark.parametrize(
    "pk", ["", "x", "-1", NUL, TOO_LARGE, DIGITS, NOT_ASCII, "1.5"], ids=lambda value: ascii(value[:9])
)
def test_a_forged_selection_decides_nothing(operator, url, pk):
    make[url]()
    action = {LIST: "release", MESSAGES: "requeue"}[url]
    values = {"action": action, "_selected_action": pk, "index": pk}
    assert operator.post(url, values, follow=True).status_code in {200, 400}


@LISTS
@pytest.mark.parametrize("pk", [TOO_LARGE, DIGITS, NOT_ASCII, ""], ids=lambda value: ascii(value[:9]))
@pytest.mark.parametrize(
    "attempt", ["0", str(2**63 - 1), TOO_LARGE, DIGITS, NOT_ASCII], ids=lambda value: ascii(value[:9])
)
def test_a_forged_decision_is_refused(operator, url, pk, attempt):
    row = make[url]()
    action, status = {LIST: ("release", "parked"), MESSAGES: ("requeue", "dead")}[url]
    values = {"action": action, "_selected_action": [row], "decided": "yes", "reason": "x"}
    assert operator.post(url, {**values, "seen": f"{pk}:1:{status}"}).status_code == 400
    forged = operator.post(url, {**values, "seen": f"{row}:{attempt}:{status}"}, follow=True)
    assert forged.status_code in {200, 400}
    assert not IdempotencyRecord.objects.filter(status=Status.RECOVERABLE).exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"body": "[" * 100_000},
        {"body": '{"a":' * 100_000},
        {"body": DIGITS},
        {"body": NUL},
        {"content_type": "application/json", "body": "[" * 100_000 + "]" * 100_000},
        {"content_type": NUL},
        {"status": TOO_LARGE},
        {"status": DIGITS},
        {"reason": NUL},
    ],
    ids=lambda wrong: ascii(wrong)[:40],
)
def test_a_hostile_outcome_is_shown_again(operator, wrong):
    page = ask(operator, "record_outcome", pk := parked())
    again = operator.post(LIST, {**hidden_fields(page), **OUTCOME, **wrong})
    assert 'class="errorlist"' in again.content.decode()
    assert IdempotencyRecord.objects.get(pk=pk).status == Status.PARKED


@pytest.mark.parametrize("body", [r'"\ud800"', r'{"\u0000": "\u0000"}', "NaN", "1e999"])
def test_json_that_a_database_may_refuse_is_recorded_as_it_was_entered(operator, body):
    page = ask(operator, "record_outcome", pk := parked())
    values = {**hidden_fields(page), **OUTCOME, "body": body}
    assert operator.post(LIST, values, follow=True).status_code == 200
    assert IdempotencyRecord.objects.get(pk=pk).status in {Status.COMPLETED, Status.PARKED}
    assert operator.get(detail(pk)).status_code == 200


@LISTS
def test_a_list_is_sorted_by_columns_with_an_index_only(operator, url):
    for order in ("1", "-1", "2.-3.4", "0", "99", "x", "", ".", "1.5", "-5"):
        ordering = operator.get(url, {"o": order}).context["cl"].queryset.query.order_by
        sortable = {"expires_at", "pk"} if url == LIST and "5" in order else set()
        assert {part.lstrip("-") for part in ordering} <= {"id", *sortable}


def test_an_order_that_is_dropped_leaves_that_of_the_filter(operator):
    ordering = operator.get(LIST, {"state": "past_retention", "o": "1"}).context["cl"].queryset.query.order_by
    assert list(ordering)[:2] == ["-expires_at", "-id"]


@LISTS
def test_a_strict_content_security_policy_is_kept(operator, url):
    """It forbids styles and scripts in the page itself, and those of another host."""
    pk = make[url]()
    action = {LIST: "record_outcome", MESSAGES: "requeue"}[url]
    model = {LIST: "idempotencyrecord", MESSAGES: "outboxmessage"}[url]
    IdempotencyRecord.objects.update(error="ValueError: x", response_body="{}")
    OutboxMessage.objects.update(error="ValueError: x", headers={"a": "b"})
    pages = [operator.get(detail(pk, model=model)), ask(operator, action, pk, url=url), operator.get(DASHBOARD)]
    for page in pages:
        assert page.status_code == 200
        inline = r"<style|\sstyle=|\son\w+=|<script(?![^>]*\bsrc=)(?![^>]*application/json)"
        assert re.findall(rf'{inline}|(?:src|href)="(?:https?:)?//', page.content.decode()) == []


@LISTS
def test_rows_in_a_state_of_a_newer_release_are_shown(operator, url):
    record, message = parked(), dead()
    IdempotencyRecord.objects.update(status="sealed", response_headers={"a": 1}, response_body="[]")
    OutboxMessage.objects.update(status="sealed")
    assert "sealed" in text(operator.get(url))
    page = operator.get(detail(record) if url == LIST else detail(message, model="outboxmessage"))
    assert "A newer release wrote this state." in text(page)
    assert 'name="action"' not in page.content.decode()
