"""The admin finds a record and shows its state. It shows responses only to users with the permission."""

import os
import re
from contextlib import nullcontext
from datetime import timedelta
from unittest.mock import Mock
from urllib.parse import parse_qsl, urlencode

import pytest
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db import DatabaseError, connection, connections
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from idempotency.admin import display
from idempotency.bodies import encode_body
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.store import statement_timeout
from tests.aliases import another_alias
from tests.concurrency.traces import session_settings
from tests.database.statements import explaining
from tests.http.admin.pages import LIST, charges, detail, listed, log_in, messages_on, refunds, text
from tests.records import HOUR, from_now, make_records
from tools.benchmarks.upkeep import CHARGES
from tools.benchmarks.upkeep import fill as fill_in_use

pytestmark = pytest.mark.django_db


@pytest.fixture
def viewer(client):
    return log_in(client, "view_idempotencyrecord")


@pytest.fixture
def reader(client):
    return log_in(client, "view_idempotencyrecord", "view_response_body")


def found(client, **query):
    return [record.idempotency_key for record in listed(client, **query)]


def test_a_record_without_a_response_is_shown(reader):
    (pk,) = make_records(1, Status.IN_PROGRESS, lease=HOUR)
    shown = text(reader.get(detail(pk)))
    assert "Payload's fingerprint: v1:" in shown
    assert [heading for heading in ("Body", "Headers", "Reference", "Last error") if heading in shown] == []


def test_a_long_body_is_shown_in_part(reader, monkeypatch):
    monkeypatch.setattr(display, "MAX_SHOWN", 5)
    (pk,) = make_records(1, response_body='"0123456789"')
    assert '"0123… (7 more characters)' in text(reader.get(detail(pk)))


@pytest.mark.parametrize("keys", [None, ["A" * 43 + "="]], ids=["", "encrypted"])
@pytest.mark.parametrize(
    ("content", "shown"),
    [(b'say "paid"', 'say "paid"'), (b"\xff", '{"$idempotency-envelope": {"encoding": "base64", "data": "/w=="}}')],
)
def test_a_body_of_text_is_shown_without_its_envelope(reader, settings, keys, content, shown):
    settings.IDEMPOTENCY = {"ENCRYPTION_KEYS": keys}
    (pk,) = make_records(1, response_body=encode_body(content, "text/plain"))
    assert f"Body: {shown}" in text(reader.get(detail(pk)))


#: The keys found by each term.
FOUND = {
    "alice": ["8e03978e-2", "8e03978e-1"],
    "8e03978e-1": ["8e03978e-1"],
    " 8e03978e-1 ": ["8e03978e-1"],
    "alice 8e03978e-2": ["8e03978e-2"],
    "bob 8e03978e-2": [],
    "org 1": ["k", "alice"],
    "org 1 k": ["k"],
    "alice 8e0": ["8e03978e-2", "8e03978e-1"],
    "alice 8e03978e… (10 characters)": ["8e03978e-2", "8e03978e-1"],
    "8e03978e": ["8e03978e-2", "8e03978e-1"],
    "8e03978e… (10 characters)": ["8e03978e-2", "8e03978e-1"],
    "E03978": [],
    "%": [],
    "a\x00b": ["k", "alice", "8e03978e-2", "8e03978e-1"],  # no column can hold NUL, so the term is ignored
    "  ": ["k", "alice", "8e03978e-2", "8e03978e-1"],
}


@pytest.mark.scenario_28
def test_a_record_is_found_by_key_and_account(viewer, monkeypatch):
    monkeypatch.setattr(statement_timeout, "LIMIT", 60)  # a busy machine takes longer, especially with many shards
    make_records(1, account_id="alice", idempotency_key="8e03978e-1")
    make_records(1, account_id="alice", idempotency_key="8e03978e-2")
    make_records(1, account_id="org 1", idempotency_key="alice")  # accounts are searched first
    make_records(1, account_id="org 1", idempotency_key="k")
    assert {term: found(viewer, q=term) for term in FOUND} == FOUND


def test_an_unfinished_record_is_found_by_its_key_in_any_table(viewer, monkeypatch):
    make_records(1, Status.PARKED, idempotency_key="parked-1")
    make_records(1, account_id="alice", idempotency_key="completed-1")
    # Searching the unfinished records finishes in time. Searching the whole table doesn't.
    out_of_time = Mock(side_effect=statement_timeout.OutOfTimeError)
    limits = iter([*[nullcontext] * 8, out_of_time, *[nullcontext] * 3])
    monkeypatch.setattr(statement_timeout, "time_limit", lambda using: next(limits)())
    assert found(viewer, q="parked-1") == found(viewer, q="parked") == ["parked-1"]
    page = viewer.get(LIST, {"q": "completed-1"})
    assert not page.context["cl"].result_list
    assert "too large to be searched for a key alone" in messages_on(page)[0]
    assert found(viewer, q="alice completed-1") == ["completed-1"]


@pytest.mark.parametrize("query", [{}, {"operation": charges.name}, {"idempotency_key": "k"}, {"q": "1"}], ids=str)
def test_a_list_that_takes_too_long_is_empty(viewer, monkeypatch, query):
    make_records(1, operation=charges.name, idempotency_key="k")
    assert found(viewer, **query) == ["k"]
    monkeypatch.setattr(statement_timeout, "LIMIT", 0)
    page = viewer.get(LIST, query)
    assert not page.context["cl"].result_list
    assert 'search for "account key"' in messages_on(page)[0]
    # A submitted form queries the list again. Its warning would stand on the next page.
    viewer.post(
        f"{LIST}?{urlencode(query)}", {"action": "", ACTION_CHECKBOX_NAME: [IdempotencyRecord.objects.get().pk]}
    )
    monkeypatch.setattr(statement_timeout, "LIMIT", 10)
    assert 'search for "account key"' not in "".join(messages_on(viewer.get(LIST)))


@pytest.mark.postgres
def test_the_time_limit_cancels_a_statement_and_leaves_no_setting_behind(monkeypatch):
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL statement_timeout = '7s'")
        with statement_timeout.time_limit("default"):
            assert session_settings("statement_timeout") == ["150ms"]
        assert session_settings("statement_timeout") == ["7s"]
        with pytest.raises(statement_timeout.OutOfTimeError), statement_timeout.time_limit("default", 0.02):
            cursor.execute("SELECT pg_sleep(60)")
        with pytest.raises(DatabaseError, match="division by zero"), statement_timeout.time_limit("default"):
            cursor.execute("SELECT 1 / 0")
        with pytest.raises(DatabaseError, match="by Django"), statement_timeout.time_limit("default"):
            raise DatabaseError("refused by Django")
        assert session_settings("statement_timeout") == ["7s"]
    with (
        another_alias(monkeypatch, "alias", os.environ["DATABASE_URL"]),
        statement_timeout.time_limit("alias"),
        connections["alias"].cursor() as cursor,
    ):
        cursor.execute("SELECT current_setting('statement_timeout')")
        assert cursor.fetchone() == ("150ms",)


def test_records_are_filtered_by_state(viewer):
    def record(key, status, **times):
        make_records(1, status, idempotency_key=key, **{"expires": HOUR, **times})

    record("live", Status.IN_PROGRESS, lease=HOUR)
    record("abandoned", Status.IN_PROGRESS, lease=-HOUR)
    record("completed", Status.COMPLETED)
    record("recoverable", Status.RECOVERABLE)
    record("parked", Status.PARKED)
    record("old", Status.COMPLETED, expires=-HOUR)
    expected = {name: [name] for name in ("live", "abandoned", "recoverable", "parked")}
    expected |= {"completed": ["old", "completed"], "past_retention": ["old"]}
    assert {state: found(viewer, state=state) for state in expected} == expected
    assert len(found(viewer)) == len(found(viewer, state="no such state")) == 6


def test_records_past_retention_are_listed_in_index_order(viewer):
    make_records(1, idempotency_key="later", expires=-HOUR)
    make_records(1, idempotency_key="earlier", expires=-2 * HOUR)
    for order in ({}, {"o": "1"}):  # a refused order leaves the filter's order
        assert found(viewer, state="past_retention", **order) == ["later", "earlier"]
    assert found(viewer) == ["earlier", "later"]


def test_records_are_filtered_by_account_and_declared_operation(viewer, monkeypatch):
    monkeypatch.setattr(statement_timeout, "LIMIT", 60)
    make_records(1, operation=charges.name, idempotency_key="a")
    make_records(1, operation=refunds.name, idempotency_key="b", account_id="bob")
    assert found(viewer, operation=refunds.name) == found(viewer, account_id="bob") == ["b"]
    assert {charges.name, refunds.name} <= filtered_operations(viewer.get(LIST))
    # The filtered operation is offered even if this process does not declare it.
    assert "tests.admin.nowhere" in filtered_operations(viewer.get(LIST, {"operation": "tests.admin.nowhere"}))


def filtered_operations(page):
    (spec,) = [one for one in page.context["cl"].filter_specs if one.title == "operation"]
    return {name for name, _ in spec.lookup_choices}


def test_times_are_relative_to_the_database_clock(viewer, monkeypatch):
    times = {"lease": timedelta(seconds=59), "expires": timedelta(days=2, hours=5, minutes=1)}
    created = from_now(-timedelta(hours=3, minutes=4))
    (pk,) = make_records(1, Status.IN_PROGRESS, created_at=created, **times)
    ahead = timezone.now() + timedelta(days=1)  # within the session's lifetime
    monkeypatch.setattr(timezone, "now", lambda: ahead)
    for page in (text(viewer.get(LIST, {"account_id": "1"})), text(viewer.get(detail(pk)))):
        assert "in progress, lease running" in page
        assert "3 h 4 min" in page
        assert re.search(r"\b\d+ s left", page)
        assert "2 d 5 h left" in page


def test_a_huge_table_is_not_counted_whole(viewer, monkeypatch):
    monkeypatch.setattr(display, "MAX_LISTED", 3)
    make_records(5)
    with CaptureQueriesContext(connection) as statements:
        page = viewer.get(LIST)
    counts = [one["sql"] for one in statements if "COUNT(" in one["sql"] and "idempotency_record" in one["sql"]]
    assert ["LIMIT 3" in sql for sql in counts] == [True]
    assert page.context["cl"].result_count == 3
    with CaptureQueriesContext(connection) as statements:
        page = viewer.get(LIST, {"_facets": "True"})
    assert "Show counts" not in text(page)
    assert not [one for one in statements if "COUNT(" in one["sql"] and "LIMIT 3" not in one["sql"]]


def test_the_number_of_statements_does_not_grow_with_the_list(viewer):
    make_records(1)
    with CaptureQueriesContext(connection) as one:
        viewer.get(LIST)
    make_records(50)
    with CaptureQueriesContext(connection) as many:
        viewer.get(LIST)
    assert len(one) == len(many)


def test_a_list_has_one_order(viewer):
    make_records(1, idempotency_key="late", expires=2 * HOUR)
    make_records(1, idempotency_key="soon", expires=HOUR)
    for column in range(6):
        assert found(viewer, o=column) == ["soon", "late"]
    assert "sortable" not in viewer.get(LIST).content.decode()


@pytest.mark.postgres
@pytest.mark.whole_table
def test_each_list_of_a_large_table_uses_an_index(viewer, monkeypatch):
    """A list sorts no whole state, and does not search the index on ids, backwards, for old rows."""
    monkeypatch.setattr(statement_timeout, "LIMIT", 60)
    fill_in_use(100_000, body=10)
    key = IdempotencyRecord.objects.filter(account_id="whale", operation=CHARGES.name).latest("pk").idempotency_key
    lists = {
        "": "pkey",
        "state=abandoned": "unfinished",
        "state=live": "unfinished",
        "state=parked": "unfinished",
        "state=past_retention": "due",
        "q=closed": "scope",
        "q=whale": "pkey",  # too many to be sorted
        f"q=whale {key}": "scope",
        f"q=whale {key[:12]}": "scope",
    }
    used = {}
    for query in lists:
        with explaining("ORDER BY") as plans:
            found(viewer, **dict(parse_qsl(query)))
        (used[query],) = set(re.findall(r"(?:using|Index Scan on|Seq Scan on) idempotency_record_?(\w*)", plans[-1]))
    assert used == lists


@pytest.mark.parametrize(
    ("duration", "written"),
    [
        *[((0,), "0 s"), ((0, -1), "0 s"), ((0, 0.4), "0 s"), ((0, 59), "59 s"), ((0, 60), "1 min")],
        *[((0, 3603), "1 h"), ((3,), "3 d"), ((2, 3 * 3600 + 240), "2 d 3 h")],
    ],
)
def test_a_duration_is_written_in_its_two_largest_units(duration, written):
    assert display.format_duration(timedelta(*duration)) == written
