"""The admin finds a record, shows its state, and resolves it. It shows responses to the permitted only."""

from __future__ import annotations

import re
from datetime import timedelta
from html import unescape
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.http import HttpResponse
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from idempotency import admin, admin_decisions, admin_display
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.operation import Operation
from idempotency.outcome import Outcome, response_of
from tests.records import HOUR, from_now, make_records, remaining

pytestmark = pytest.mark.django_db

LIST = reverse("admin:idempotency_idempotencyrecord_changelist")
SECRET = "4242-4242-<b>"

charges = Operation("tests.admin.charges")
refunds = Operation("tests.admin.refunds")


def log_in(client: Client, *permissions: str, superuser: bool = False) -> None:
    user = User.objects.create_user("staff", is_staff=True, is_superuser=superuser)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client.force_login(user)


@pytest.fixture
def viewer(client: Client) -> Client:
    log_in(client, "view_idempotencyrecord")
    return client


@pytest.fixture
def reader(client: Client) -> Client:
    log_in(client, "view_idempotencyrecord", "view_response_body")
    return client


def detail(pk: int, view: str = "change") -> str:
    return reverse(f"admin:idempotency_idempotencyrecord_{view}", args=[pk])


def text(response: HttpResponse) -> str:
    """What a person sees of a page."""
    assert response.status_code == 200
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", response.content.decode())).split())


def listed(client: Client, **query: str) -> list[str]:
    """The keys of the records that are listed."""
    page = client.get(LIST, query)
    assert page.status_code == 200, page
    return [record.idempotency_key for record in page.context["cl"].result_list]


def secret_record(**fields: Any) -> int:
    (pk,) = make_records(
        response_headers=[["Link", SECRET], ["Link", "second"]],
        response_body=f'{{"card": "{SECRET}"}}',
        response_reference=f"reference {SECRET}",
        **fields,
    )
    return pk


def test_nobody_adds_changes_or_deletes_a_record(client: Client) -> None:
    log_in(client, superuser=True)
    (pk,) = make_records(1)
    add = reverse("admin:idempotency_idempotencyrecord_add")
    action = {"action": "delete_selected", "_selected_action": [pk], "post": "yes"}
    assert client.get(add).status_code == 403
    assert client.post(add, {}).status_code == 403
    assert client.post(detail(pk), {"status": "recoverable"}).status_code == 403
    assert client.post(detail(pk, "delete"), {"post": "yes"}).status_code == 403
    client.post(LIST, action)
    assert remaining() == {pk}
    assert IdempotencyRecord.objects.get().status == Status.COMPLETED
    assert "<input" not in client.get(detail(pk)).content.decode().partition('id="content"')[2].partition("<form")[0]


def test_who_has_no_permission_sees_nothing(client: Client) -> None:
    pk = secret_record()
    log_in(client, "view_response_body")
    for url in (LIST, detail(pk)):
        response = client.get(url)
        assert response.status_code == 403
        assert SECRET not in unescape(response.content.decode())


def test_scenario_28_a_response_is_shown_to_the_permitted_only(client: Client) -> None:
    pk = secret_record()
    log_in(client, "view_idempotencyrecord")
    with CaptureQueriesContext(connection) as statements:
        pages = [client.get(LIST), client.get(detail(pk)), client.get(detail(pk, "history"))]
    assert [page.status_code for page in pages] == [200, 200, 200]
    assert not [page for page in pages if "4242" in page.content.decode()]
    # Not shown because not read: the response isn't loaded at all.
    assert not [statement for statement in statements if "response_body" in statement["sql"]]
    assert "201" in text(pages[1])


def test_scenario_28_the_permitted_read_the_response(reader: Client) -> None:
    pk = secret_record()
    page = reader.get(detail(pk))
    assert f'"{SECRET}"' not in page.content.decode(), "the page must escape what a response holds"
    seen = unescape(page.content.decode())
    assert f'{{"card": "{SECRET}"}}' in seen
    assert f"Link: {SECRET}\nLink: second" in seen
    assert f"reference {SECRET}" in seen
    assert SECRET not in unescape(reader.get(LIST).content.decode())


def test_a_record_without_a_response_is_shown(reader: Client) -> None:
    (pk,) = make_records(1, Status.IN_PROGRESS, lease=HOUR)
    assert f"body: {admin_display.NONE}" in text(reader.get(detail(pk))).lower()


def test_a_long_body_is_shown_in_part(reader: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_display, "MAX_SHOWN", 5)
    (pk,) = make_records(1, response_body='"0123456789"')
    assert '"0123… (7 more characters)' in text(reader.get(detail(pk)))


@pytest.mark.parametrize(
    "lookup",
    [
        "response_body__startswith",
        "response_body",
        "response_headers__0__0",
        "response_reference__contains",
        "request_hash",
    ],
)
def test_what_may_not_be_shown_may_not_be_filtered_on(reader: Client, lookup: str) -> None:
    """Otherwise a staff member without the permission would guess it letter by letter."""
    secret_record()
    assert reader.get(LIST, {lookup: "x"}).status_code == 400


def test_a_link_may_filter_by_account(viewer: Client) -> None:
    make_records(1, account_id="alice", idempotency_key="a")
    make_records(1, account_id="bob", idempotency_key="b")
    assert listed(viewer, account_id="bob") == ["b"]


@pytest.mark.parametrize(
    ("term", "keys"),
    [
        ("alice", ["8e03978e-2", "8e03978e-1"]),
        ("8e03978e-1", ["8e03978e-1"]),
        (" 8e03978e-1 ", ["8e03978e-1"]),
        ("alice 8e03978e-2", ["8e03978e-2"]),
        ("bob 8e03978e-2", []),
        ("org 1", ["k", "alice"]),
        ("org 1 k", ["k"]),
        ("8e03978e", ["8e03978e-2", "8e03978e-1"]),
        ("8e03978e… (10 characters)", ["8e03978e-2", "8e03978e-1"]),
        ("E03978", []),
        ("%", []),
        ("  ", ["k", "alice", "8e03978e-2", "8e03978e-1"]),
    ],
)
def test_scenario_28_a_record_is_found_by_its_key_and_by_its_account(
    viewer: Client, term: str, keys: list[str]
) -> None:
    make_records(1, account_id="alice", idempotency_key="8e03978e-1")
    make_records(1, account_id="alice", idempotency_key="8e03978e-2")
    make_records(1, account_id="org 1", idempotency_key="alice")
    make_records(1, account_id="org 1", idempotency_key="k")
    if term == "alice":
        keys = ["alice", *keys]  # both as a key and as an account
    assert listed(viewer, q=term) == keys


def test_a_search_with_a_character_no_column_can_hold_is_refused_kindly(viewer: Client) -> None:
    make_records(1)
    assert viewer.get(LIST, {"q": "a\x00b"}).status_code == 200


def test_it_filters_by_state(viewer: Client) -> None:
    def record(key: str, status: Status, **times: Any) -> None:
        make_records(1, status, idempotency_key=key, **{"expires": HOUR, **times})

    record("live", Status.IN_PROGRESS, lease=HOUR)
    record("abandoned", Status.IN_PROGRESS, lease=-HOUR)
    record("completed", Status.COMPLETED)
    record("recoverable", Status.RECOVERABLE)
    record("parked", Status.FAILED)
    record("old", Status.COMPLETED, expires=-HOUR)
    assert listed(viewer, state="live") == ["live"]
    assert listed(viewer, state="abandoned") == ["abandoned"]
    assert listed(viewer, state="completed") == ["old", "completed"]
    assert listed(viewer, state="recoverable") == ["recoverable"]
    assert listed(viewer, state="parked") == ["parked"]
    assert listed(viewer, state="past_retention") == ["old"]
    assert len(listed(viewer)) == len(listed(viewer, state="no such state")) == 6


def test_it_filters_by_the_operations_that_are_declared(viewer: Client) -> None:
    make_records(1, operation=charges.name, idempotency_key="a")
    make_records(1, operation=refunds.name, idempotency_key="b")
    assert listed(viewer, operation=refunds.name) == ["b"]
    page = text(viewer.get(LIST))
    assert charges.name in page
    assert refunds.name in page


def test_age_lease_and_retention_are_told_by_the_clock_of_the_database(
    viewer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pk,) = make_records(
        1,
        Status.IN_PROGRESS,
        lease=timedelta(seconds=30.2),
        expires=timedelta(days=2, hours=5, minutes=1),
        created_at=from_now(-timedelta(hours=3, minutes=4, seconds=30)),
    )
    ahead = timezone.now() + timedelta(days=1)  # less than a session lasts
    monkeypatch.setattr(timezone, "now", lambda: ahead)
    for page in (text(viewer.get(LIST, {"account_id": "1"})), text(viewer.get(detail(pk)))):
        assert "in progress, lease running" in page
        assert "3 h 4 min" in page
        assert re.search(r"\b(30|2\d) s left", page)
        assert "2 d 5 h left" in page


def test_each_state_is_told_in_words(viewer: Client) -> None:
    make_records(1, Status.IN_PROGRESS, lease=-timedelta(seconds=90), expires=-timedelta(days=1))
    make_records(1, Status.IN_PROGRESS, expires=HOUR)
    make_records(1, Status.RECOVERABLE)
    make_records(1, Status.FAILED)
    make_records(1, response_status=402)
    rows = viewer.get(LIST).context["cl"].result_list
    shown = admin.IdempotencyRecordAdmin(IdempotencyRecord, admin.admin.site)
    states = [shown.state(row) for row in rows]
    assert states == ["completed, 402", "failed: outcome unknown", "recoverable", *["in progress, lease over"] * 2]
    assert [shown.lease(row) for row in rows][:4] == [admin_display.NONE] * 4
    assert re.fullmatch(r"over for 1 min 3\d s", shown.lease(rows[4]))
    assert shown.retention(rows[4]) == "over for 1 d"
    assert shown.age(rows[0]).endswith(" s")


def test_a_huge_table_is_not_counted_whole(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_display, "MAX_LISTED", 3)
    make_records(5)
    with CaptureQueriesContext(connection) as statements:
        page = viewer.get(LIST)
    counts = [one["sql"] for one in statements if "COUNT(" in one["sql"] and "idempotency_record" in one["sql"]]
    assert len(counts) == 1
    assert "LIMIT 3" in counts[0]
    assert page.context["cl"].result_count == 3
    with CaptureQueriesContext(connection) as statements:
        page = viewer.get(LIST, {"_facets": "True"})
    assert "Show counts" not in text(page)
    assert not [one for one in statements if "COUNT(" in one["sql"] and "LIMIT 3" not in one["sql"]]


def test_the_number_of_statements_does_not_grow_with_the_list(viewer: Client) -> None:
    make_records(1)
    with CaptureQueriesContext(connection) as one:
        viewer.get(LIST)
    make_records(50)
    with CaptureQueriesContext(connection) as many:
        viewer.get(LIST)
    assert len(one) == len(many)


def test_a_list_is_sorted_by_an_index_only(viewer: Client) -> None:
    make_records(1, idempotency_key="late", expires=2 * HOUR)
    make_records(1, idempotency_key="soon", expires=HOUR)
    assert listed(viewer) == ["soon", "late"]
    column = admin.IdempotencyRecordAdmin.list_display.index("retention")
    assert listed(viewer, o=f"-{column}") == ["late", "soon"]
    make_records(1, idempotency_key="last", expires=3 * HOUR)
    assert listed(viewer, o=f"{column}") == ["soon", "late", "last"]
    assert re.findall(r'class="sortable column-(\w+)', viewer.get(LIST).content.decode()) == ["retention"]


@pytest.mark.parametrize(
    ("duration", "written"),
    [
        (timedelta(0), "0 s"),
        (timedelta(seconds=-1), "0 s"),
        (timedelta(seconds=0.4), "0 s"),
        (timedelta(seconds=59), "59 s"),
        (timedelta(seconds=60), "1 min"),
        (timedelta(hours=1, seconds=3), "1 h"),
        (timedelta(days=3), "3 d"),
        (timedelta(days=2, hours=3, minutes=4), "2 d 3 h"),
    ],
)
def test_a_duration_is_written_in_its_two_largest_units(duration: timedelta, written: str) -> None:
    assert admin_display.written(duration) == written


# Decisions

ACTIONS = {"mark_not_executed": "resolve", "record_outcome": "resolve", "release": "release"}
OUTCOME = {"status": "201", "content_type": "application/json", "body": '{"id": 7}', "reason": "asked the bank"}


def parked(**fields: Any) -> int:
    (pk,) = make_records(1, Status.FAILED, **{"expires": HOUR, "operation": charges.name} | fields)
    return pk


def ask(client: Client, action: str, *pks: int, **query: str) -> Any:
    return client.post(LIST + ("?" + urlencode(query) if query else ""), {"action": action, "_selected_action": pks})


def decide(client: Client, page: Any, **values: Any) -> list[str]:
    """Send the form of a page as a browser does: what it says then."""
    fields: dict[str, list[str]] = {}
    for name, value in re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', page.content.decode()):
        fields.setdefault(name, []).append(unescape(value))
    response = client.post(LIST, {**fields, **values}, follow=True)
    assert response.status_code == 200
    return [str(message) for message in response.context["messages"]] if "messages" in response.context else []


def state_of(pk: int) -> tuple[str, int]:
    return IdempotencyRecord.objects.values_list("status", "attempt").get(pk=pk)


@pytest.fixture
def operator(client: Client) -> Client:
    log_in(client, "view_idempotencyrecord", "resolve_idempotencyrecord", "release_idempotencyrecord")
    return client


@pytest.mark.parametrize("action", ACTIONS)
def test_scenario_28_a_parked_record_is_resolved_after_a_question_and_leaves_an_audit_entry(
    operator: Client, action: str
) -> None:
    pk = parked(idempotency_key="8e03978e")
    page = ask(operator, action, pk)
    seen = text(page)
    for shown in (charges.name, "8e03978e", "failed: outcome unknown", "No, take me back"):
        assert shown in seen
    assert "takes effect" in seen or "took effect" in seen
    assert state_of(pk) == ("failed", 1)  # nothing was decided yet

    values = OUTCOME if action == "record_outcome" else {"reason": "asked the bank"}
    (said,) = decide(operator, page, **values)
    assert said.endswith(": 1 record.")
    assert state_of(pk) == ("completed" if action == "record_outcome" else "recoverable", 1)
    history = text(operator.get(detail(pk, "history")))
    assert "asked the bank" in history
    assert "staff" in history
    entry = LogEntry.objects.get()
    assert (entry.object_id, entry.user.username) == (str(pk), "staff")


@pytest.mark.parametrize("action", ACTIONS)
def test_scenario_28_each_decision_needs_its_own_permission(client: Client, action: str) -> None:
    other = {"resolve": "release_idempotencyrecord", "release": "resolve_idempotencyrecord"}[ACTIONS[action]]
    log_in(client, "view_idempotencyrecord", "change_idempotencyrecord", "view_response_body", other)
    pk = parked()
    seen = f"{pk}:1:failed"
    values = {"action": action, "_selected_action": [pk], "decided": "yes", "seen": [seen], "force": "on", **OUTCOME}
    page = client.post(LIST, values, follow=True)
    assert "No action selected" in text(page)
    assert f'value="{action}"' not in client.get(LIST).content.decode()
    assert state_of(pk) == ("failed", 1)
    assert not LogEntry.objects.exists()


def test_who_may_only_look_sees_no_actions(viewer: Client) -> None:
    make_records(1)
    assert 'name="action"' not in viewer.get(LIST).content.decode()


def test_an_outcome_that_was_recorded_is_replayed_as_it_was_entered(operator: Client) -> None:
    pk = parked()
    decide(operator, ask(operator, "record_outcome", pk), **{**OUTCOME, "body": '{\r\n"id": 7}\r\n'})
    row = IdempotencyRecord.objects.get(pk=pk)
    assert (row.response_status, row.response_body) == (201, '{\n"id": 7}\n')
    assert row.response_headers == [["Content-Type", "application/json"]]
    other = parked()
    plain = {**OUTCOME, "status": "402", "content_type": "text/plain", "body": "  no\n"}
    decide(operator, ask(operator, "record_outcome", other), **plain)
    row = IdempotencyRecord.objects.get(pk=other)
    assert response_of(Outcome.stored(402, row.response_headers, row.response_body, None)).content == b"  no\n"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"status": "99"}, "greater than or equal to 200"),
        ({"status": ""}, "required"),
        ({"body": "{"}, "This is not JSON"),
        ({"body": ""}, "This is not JSON"),
        ({"content_type": "text/plain\r\nSet-Cookie: a=b"}, "visible ASCII"),
        ({"content_type": "text/plän"}, "visible ASCII"),
        ({"reason": ""}, "required"),
    ],
)
def test_a_form_that_is_wrong_is_shown_again(operator: Client, wrong: dict[str, str], said: str) -> None:
    pk = parked()
    page = ask(operator, "record_outcome", pk)
    again = operator.post(
        LIST,
        {"action": "record_outcome", "_selected_action": [pk], "decided": "yes", "seen": f"{pk}:1:failed"}
        | {**OUTCOME, **wrong},
    )
    assert said in text(again)
    assert "failed: outcome unknown" in text(again)
    assert state_of(pk) == ("failed", 1)
    assert decide(operator, again, **OUTCOME) == ["Record an outcome: 1 record."]
    assert page.status_code == 200


def test_what_the_operation_would_not_record_is_refused_with_the_reason(operator: Client) -> None:
    pk = parked()
    (said,) = decide(operator, ask(operator, "record_outcome", pk), **{**OUTCOME, "status": "503"})
    assert "503 is not an outcome" in said
    unknown = parked(operation="tests.admin.removed")
    (said,) = decide(operator, ask(operator, "record_outcome", unknown), **OUTCOME)
    assert "operations.py" in said
    assert (state_of(pk), state_of(unknown)) == (("failed", 1), ("failed", 1))


def test_what_was_decided_is_what_was_seen(operator: Client) -> None:
    """Between the question and the answer another operator, a retry or the purge may have been faster."""
    first, second, third, fourth = (parked() for _ in range(4))
    page = ask(operator, "mark_not_executed", first, second, third, fourth, state="parked")
    IdempotencyRecord.objects.filter(pk=second).update(status=Status.COMPLETED)
    IdempotencyRecord.objects.filter(pk=third).update(attempt=2)
    IdempotencyRecord.objects.filter(pk=fourth).delete()
    said = decide(operator, page, reason="asked")
    assert [message for message in said if "is completed, attempt 1 by now" in message]
    assert [message for message in said if "is failed, attempt 2 by now" in message]
    assert f"Record {fourth} is gone: it was purged." in said
    assert said[-1] == "Mark as not executed: 1 record."
    assert [state_of(pk) for pk in (first, second, third)] == [("recoverable", 1), ("completed", 1), ("failed", 2)]


def test_a_form_whose_record_is_gone_is_shown_without_it(operator: Client) -> None:
    pk = parked(idempotency_key="8e03978e")
    page = ask(operator, "mark_not_executed", pk)
    IdempotencyRecord.objects.all().delete()
    assert decide(operator, page, reason="") == []


def test_a_live_claim_is_released_by_force_alone(operator: Client) -> None:
    (pk,) = make_records(1, Status.IN_PROGRESS, lease=HOUR, expires=2 * HOUR, operation=charges.name)
    page = ask(operator, "release", pk)
    assert "in progress, lease running" in text(page)
    (said,) = decide(operator, page, reason="the host is gone")
    assert "its lease is running" in said
    assert state_of(pk) == ("in_progress", 1)
    assert decide(operator, page, reason="the host is gone", force="on") == ["Release: 1 record."]
    assert state_of(pk) == ("recoverable", 2)


def test_no_more_are_decided_at_once_than_fit_a_page(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_decisions, "MAX_DECIDED", 2)
    pks = [parked() for _ in range(3)]
    page = operator.post(LIST, {"action": "release", "_selected_action": pks}, follow=True)
    assert "Release: select up to 2 at a time." in text(page)
    everything = {"action": "release", "_selected_action": pks[:1], "select_across": "1"}
    assert "select up to 2 at a time" in text(operator.post(LIST, everything, follow=True))
    assert decide(operator, ask(operator, "release", *pks[:2]), reason="x") == ["Release: 2 records."]
    one = operator.post(LIST, {"action": "record_outcome", "_selected_action": pks}, follow=True)
    assert "Record an outcome: select up to 1 at a time." in text(one)
    forged = {"action": "release", "_selected_action": pks, "decided": "yes", "reason": "x"}
    operator.post(LIST, {**forged, "seen": [f"{pk}:1:failed" for pk in [pks[0], pks[0], pks[2]]]})
    assert state_of(pks[2]) == ("failed", 1)


@pytest.mark.parametrize("token", ["", "1", "x:1:failed", "1:1:no such state", "1:1:failed:more"])
def test_a_forged_form_is_a_bad_request(operator: Client, token: str) -> None:
    pk = parked()
    values = {"action": "release", "_selected_action": [pk], "decided": "yes", "seen": token, "reason": "x"}
    assert operator.post(LIST, values).status_code == 400
    assert state_of(pk) == ("failed", 1)


def test_a_page_that_asks_escapes_what_a_client_sent(operator: Client) -> None:
    pk = parked(idempotency_key="<script>alert(1)</script>", account_id="<b>")
    source = ask(operator, "release", pk).content.decode()
    assert "<script>alert" not in source
    assert "&lt;script&gt;alert" in source


def test_no_body_is_shown_to_who_resolves_without_the_permission(operator: Client) -> None:
    pk = secret_record(expires=HOUR, operation=charges.name)
    IdempotencyRecord.objects.update(status=Status.FAILED)
    for action in ACTIONS:
        assert "4242" not in ask(operator, action, pk).content.decode()
    decide(operator, ask(operator, "record_outcome", pk), **{**OUTCOME, "body": '"5353"'})
    for page in (operator.get(LIST), operator.get(detail(pk)), operator.get(detail(pk, "history"))):
        assert "5353" not in page.content.decode()
