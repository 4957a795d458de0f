"""The admin answers every URL and every form without a server error."""

import re
from collections import Counter
from urllib.parse import urlencode

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from idempotency.admin import decisions
from idempotency.bodies import decode_body
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.outbox.models import MessageStatus, OutboxMessage
from tests.http.admin.pages import (
    DASHBOARD,
    LIST,
    MESSAGES,
    OUTCOME,
    choose,
    decide,
    detail,
    hidden_fields,
    log_in,
    record,
    text,
)
from tests.http.callers import FORM
from tests.outbox import make_messages
from tests.results import recording

pytestmark = pytest.mark.django_db

LISTS = pytest.mark.parametrize("url", [LIST, MESSAGES], ids=["records", "messages"])

NUL = "a\0b"
TOO_LARGE = "9" * 30
DIGITS = "9" * 5_000
NOT_ASCII = "\u0663"
TOO_LONG = "x" * 256


@pytest.fixture
def operator(client):
    client.raise_request_exception = False
    return log_in(client, superuser=True)


def dead():
    (pk,) = make_messages(1, MessageStatus.DEAD, attempts=16)
    return pk


make = {LIST: record, MESSAGES: dead}


def nothing_is_decided():
    kept = IdempotencyRecord.objects.filter(status=Status.PARKED), OutboxMessage.objects.filter(status="dead")
    return sum(rows.count() for rows in kept) == 1


@LISTS
@pytest.mark.parametrize("value", [NUL, TOO_LARGE, DIGITS, NOT_ASCII, "-1", "%"], ids=lambda value: ascii(value[:9]))
def test_a_list_answers_any_query(operator, url, value):
    make[url]()
    for name in ("q", "state", "operation", "account_id", "idempotency_key", "message_id", "o", "p", "e"):
        assert operator.get(url, {name: value}, follow=True).status_code in {200, 400}, name


@pytest.mark.parametrize("query", [{"account_id": TOO_LONG}, {"q": TOO_LONG}, {"q": f"{TOO_LONG} k"}], ids=str)
def test_no_account_longer_than_its_column_reaches_the_database(operator, query):
    """Citus refuses such a statement."""
    with CaptureQueriesContext(connection) as statements:
        assert operator.get(LIST, query, follow=True).status_code == 200
    assert not [one["sql"] for one in statements if re.search(rf"account_id\W+=\W+{TOO_LONG}", one["sql"])]


@pytest.mark.parametrize("model", ["idempotencyrecord", "outboxmessage"])
@pytest.mark.parametrize("view", ["change", "history"])
def test_the_page_of_a_missing_row_redirects(operator, view, model):
    for pk in ("x", "0", "-1", TOO_LARGE, DIGITS, "_00", "_ZZ"):
        assert operator.get(detail(pk, view, model), follow=True).status_code == 200, pk[:9]


@LISTS
def test_a_forged_selection_decides_nothing(operator, url):
    make[url]()
    action = {LIST: "release", MESSAGES: "requeue"}[url]
    for pk in ("", "x", "-1", NUL, TOO_LARGE, DIGITS, NOT_ASCII, "1.5"):
        values = {"action": action, "_selected_action": pk, "index": pk}
        assert operator.post(url, values, follow=True).status_code in {200, 400}, pk[:9]
    assert nothing_is_decided()


#: Forged states of a row. The list page may answer only a token of another row or attempt.
TOKENS = ["", "1", "x:1:STATUS", "PK:1:no such state", "PK:1:STATUS:more"]
TOKENS += [f"{pk}:1:STATUS" for pk in (TOO_LARGE, DIGITS, NOT_ASCII, "")]
ATTEMPTS = ["0", str(2**63 - 1), TOO_LARGE, DIGITS, NOT_ASCII]


@LISTS
def test_a_forged_decision_is_refused(operator, url):
    row = make[url]()
    action, status = {LIST: ("release", "parked"), MESSAGES: ("requeue", "dead")}[url]
    values = {"action": action, "_selected_action": [row], "decided": "yes", "reason": "x"}
    forged = {token: {400} for token in TOKENS} | {f"PK:{attempt}:STATUS": {200, 400} for attempt in ATTEMPTS}
    for token, answered in forged.items():
        seen = token.replace("PK", str(row)).replace("STATUS", status)
        assert operator.post(url, {**values, "seen": seen}, follow=True).status_code in answered, token[:12]
    assert nothing_is_decided()


WRONG_OUTCOMES = [
    ({"status": "99"}, "greater than or equal to 200"),
    *(({"status": status}, "") for status in (TOO_LARGE, DIGITS)),
    ({"status": ""}, "required"),
    *(({"body": body}, "This is not JSON") for body in ("{", "")),
    *(({"body": body}, "") for body in (DIGITS, NUL, "[" * 100_000, '{"a":' * 100_000)),
    ({"body": "[" * 100_000 + "]" * 100_000}, ""),
    *(({"content_type": f"text/{name}"}, "printable ASCII") for name in ("plain\r\nSet-Cookie: a=b", "plän")),
    ({"content_type": NUL}, ""),
    ({"reason": ""}, "required"),
    ({"reason": NUL}, ""),
]


def test_an_invalid_outcome_is_shown_again_and_can_be_corrected(operator):
    page = choose(operator, "record_outcome", pk := record())
    for wrong, error in WRONG_OUTCOMES:
        again = operator.post(LIST, {**hidden_fields(page), **OUTCOME, **wrong})
        assert 'class="errorlist"' in again.content.decode(), ascii(wrong)[:40]
        assert error in text(again)
        assert "parked" in text(again)
        assert IdempotencyRecord.objects.get(pk=pk).status == Status.PARKED
    assert decide(operator, again, **OUTCOME) == ["Record an outcome: 1 idempotency record."]


@pytest.mark.parametrize("body", [r'"\ud800"', r'{"\u0000": "\u0000"}', "NaN", "1e999"])
def test_json_that_a_database_may_refuse_is_recorded_as_entered(operator, body):
    page = choose(operator, "record_outcome", pk := record())
    assert decide(operator, page, **{**OUTCOME, "body": body}) == ["Record an outcome: 1 idempotency record."]
    row = IdempotencyRecord.objects.get(pk=pk)
    assert (row.status, decode_body(row.response_body)) == (Status.COMPLETED, body.encode())
    assert operator.get(detail(pk)).status_code == 200


@LISTS
def test_a_list_is_sorted_by_columns_with_an_index_only(operator, url):
    for order in ("1", "-1", "2.-3.4", "0", "99", "x", "", ".", "1.5", "-5"):
        ordering = operator.get(url, {"o": order}).context["cl"].queryset.query.order_by
        sortable = {"expires_at", "pk"} if url == LIST and "5" in order else set()
        assert {part.lstrip("-") for part in ordering} <= {"id", *sortable}


@LISTS
def test_a_strict_content_security_policy_is_kept(operator, url):
    """It forbids inline styles and scripts, and files from another host."""
    pk = make[url]()
    action = {LIST: "record_outcome", MESSAGES: "requeue"}[url]
    model = {LIST: "idempotencyrecord", MESSAGES: "outboxmessage"}[url]
    IdempotencyRecord.objects.update(error="ValueError: x", response_body="{}")
    OutboxMessage.objects.update(error="ValueError: x", headers={"a": "b"})
    pages = [operator.get(detail(pk, model=model)), choose(operator, action, pk, url=url), operator.get(DASHBOARD)]
    for page in pages:
        assert page.status_code == 200
        inline = r"<style|\sstyle=|\son\w+=|<script(?![^>]*\bsrc=)(?![^>]*application/json)"
        assert re.findall(rf'{inline}|(?:src|href)="(?:https?:)?//', page.content.decode()) == []


@LISTS
def test_rows_in_a_state_of_a_newer_release_are_shown(operator, url):
    pk, message = record(), dead()
    IdempotencyRecord.objects.update(status="sealed", response_headers={"a": 1}, response_body="[]")
    OutboxMessage.objects.update(status="sealed")
    assert "sealed" in text(operator.get(url))
    page = operator.get(detail(pk) if url == LIST else detail(message, model="outboxmessage"))
    assert "A newer release wrote this state." in text(page)
    assert 'name="action"' not in page.content.decode()


ACTIONS = ["release", "record_outcome", "mark_not_executed", "requeue", "delete_selected", "no such action"]
NAMES = ["action", "_selected_action", "index", "select_across", "decided", "seen", "reason", "status", "content_type"]
NAMES += ["body", "q", "p", "o", "e", "state", "operation", "idempotency_key", "account_id", "_popup"]
ROW = ["PK", "PK:1:parked", "PK:1:dead", "PK:0:", "yes"]

texts = st.sampled_from([*ACTIONS, *ROW, NUL, TOO_LARGE, DIGITS, NOT_ASCII, TOO_LONG]) | st.text(max_size=20)
several = st.lists(texts, max_size=3)
fields = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), several, max_size=6)
decisions_sent = st.fixed_dictionaries({}, optional=dict.fromkeys(["_selected_action", "seen", "decided"], several))


def send_anything(operator, count):
    """Send random forms and queries to each page. Returns the count of each status."""
    answered = Counter()

    @hypothesis_settings(max_examples=count or 40, deadline=None, suppress_health_check=list(HealthCheck))
    @example(url=LIST, form={"_selected_action": ["x"]}, query={}, action="release")
    @given(
        url=st.sampled_from([LIST, MESSAGES, DASHBOARD]),
        form=decisions_sent | fields,
        query=fields,
        action=st.sampled_from(ACTIONS),
    )
    def send(url, form, query, action):
        pk = (dead if url == MESSAGES else record)()
        page = f"{url}?{urlencode(query, doseq=True, errors='replace')}"
        sent = urlencode({"action": action, "_selected_action": "PK", **form}, doseq=True, errors="replace")
        posted = operator.post(page, sent.replace("PK", str(pk)), content_type=FORM, follow=True)
        for answer in (posted, operator.get(page, follow=True)):
            answered[answer.status_code] += 1
            assert answer.status_code < 500

    send()
    return answered


def test_the_fuzz_of_forms_and_queries_gives_no_server_error(operator, count, seed):
    with recording("fuzz: admin", seed=seed) as figures:
        answered = send_anything(operator, count)
        figures |= {"inputs": answered.total() // 2, "answers": dict(answered)}
    assert {200, 400} <= answered.keys()


def test_the_fuzz_finds_an_action_that_trusts_its_form(operator, monkeypatch):
    monkeypatch.setattr(decisions, "parse_number", int)
    with pytest.raises(AssertionError):
        send_anything(operator, None)
