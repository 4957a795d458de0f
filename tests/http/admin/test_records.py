"""The admin finds a record and shows its state. It shows responses to the permitted only."""

from __future__ import annotations

import re
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from idempotency.admin import display, records
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyCounter, IdempotencyRecord
from tests.http.admin.pages import SECRET, log_in, text, told
from tests.http.admin.records import LIST, charges, detail, refunds, secret_record
from tests.records import HOUR, from_now, make_records, remaining

pytestmark = pytest.mark.django_db


@pytest.fixture
def viewer(client: Client) -> Client:
    log_in(client, "view_idempotencyrecord")
    return client


@pytest.fixture
def reader(client: Client) -> Client:
    log_in(client, "view_idempotencyrecord", "view_response_body")
    return client


def listed(client: Client, **query: str) -> list[str]:
    """The keys of the records that are listed."""
    page = client.get(LIST, query)
    assert page.status_code == 200, page
    return [record.idempotency_key for record in page.context["cl"].result_list]


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


def test_who_may_only_look_sees_no_actions(viewer: Client) -> None:
    make_records(1)
    assert 'name="action"' not in viewer.get(LIST).content.decode()


@pytest.mark.scenario(28)
def test_a_response_is_shown_to_the_permitted_only(client: Client) -> None:
    pk = secret_record()
    log_in(client, "view_idempotencyrecord")
    with CaptureQueriesContext(connection) as statements:
        pages = [client.get(LIST), client.get(detail(pk)), client.get(detail(pk, "history"))]
    assert [page.status_code for page in pages] == [200, 200, 200]
    assert not [page for page in pages if "4242" in page.content.decode()]
    # Not shown because not read: the response isn't loaded at all.
    assert not [statement for statement in statements if "response_body" in statement["sql"]]
    assert "201" in text(pages[1])


@pytest.mark.scenario(28)
def test_the_permitted_read_the_response(reader: Client) -> None:
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
    assert f"body: {display.NONE}" in text(reader.get(detail(pk))).lower()


def test_a_long_body_is_shown_in_part(reader: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "MAX_SHOWN", 5)
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


@pytest.mark.scenario(28)
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
def test_a_record_is_found_by_its_key_and_by_its_account(viewer: Client, term: str, keys: list[str]) -> None:
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
    record("parked", Status.PARKED)
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


def filtered_operations(page: Any) -> list[str]:
    """The operations that the filter offers."""
    (spec,) = [one for one in page.context["cl"].filter_specs if one.title == "operation"]
    return [name for name, _ in spec.lookup_choices]


def test_operations_of_other_processes_are_offered_as_they_were_counted(
    viewer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of ``claim()`` blocks too, which are declared where they run and nowhere else."""
    for operation in ("tests.admin.elsewhere", "", charges.name, "tests.admin.another"):
        for event in ("claimed", "completed"):
            IdempotencyCounter.objects.create(operation=operation, event=event, total=1)
    make_records(1, operation="tests.admin.elsewhere", idempotency_key="there")
    offered = filtered_operations(viewer.get(LIST))
    assert offered == sorted(set(offered))
    assert {"tests.admin.another", "tests.admin.elsewhere", charges.name, refunds.name} <= set(offered)
    assert "" not in offered
    assert listed(viewer, operation="tests.admin.elsewhere") == ["there"]
    monkeypatch.setattr(records, "MAX_OPERATIONS", 1)
    assert "tests.admin.elsewhere" not in filtered_operations(viewer.get(LIST))


def test_the_operation_that_is_filtered_by_is_offered_whoever_knows_it(viewer: Client) -> None:
    assert "tests.admin.nowhere" in filtered_operations(viewer.get(LIST, {"operation": "tests.admin.nowhere"}))


@pytest.mark.postgres
def test_the_operations_are_found_in_the_index_of_the_counters_alone(viewer: Client) -> None:
    IdempotencyCounter.objects.bulk_create(
        IdempotencyCounter(operation=f"op-{number}", event="claimed") for number in range(2_000)
    )
    with CaptureQueriesContext(connection) as statements:
        viewer.get(LIST)
    (statement,) = [one["sql"] for one in statements if "idempotency_counter" in one["sql"]]
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE idempotency_counter")
        cursor.execute(f"EXPLAIN {statement}")
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert "idempotency_counter_event" in plan
    assert "Seq Scan" not in plan


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
    make_records(1, Status.PARKED)
    make_records(1, response_status=402)
    rows = viewer.get(LIST).context["cl"].result_list
    shown = records.IdempotencyRecordAdmin(IdempotencyRecord, records.admin.site)
    states = [told(shown.state(row)) for row in rows]
    assert states == ["completed, 402", "parked", "recoverable", *["in progress, lease over"] * 2]
    assert [shown.lease(row) for row in rows][:4] == [display.NONE] * 4
    assert re.fullmatch(r"over for 1 min 3\d s", shown.lease(rows[4]))
    assert shown.retention(rows[4]) == "over for 1 d"
    assert shown.age(rows[0]).endswith(" s")


def test_a_huge_table_is_not_counted_whole(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "MAX_LISTED", 3)
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
    column = records.IdempotencyRecordAdmin.list_display.index("retention")
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
    assert display.format_duration(duration) == written
