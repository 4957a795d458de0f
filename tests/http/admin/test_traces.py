"""A trace from a log line finds its records in the admin."""

import html
import re
from urllib.parse import urlencode
from uuid import uuid4

import pytest

from idempotency.admin import records
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from tests.http.admin.pages import LIST, charges, listed, log_in, messages_on, record
from tests.records import HOUR, make_records

pytestmark = pytest.mark.django_db


@pytest.fixture
def reader(client):
    return log_in(client, "view_idempotencyrecord")


def completed(**fields):
    pk = record(Status.COMPLETED, **fields)
    return IdempotencyRecord.objects.get(pk=pk)


def pks(client, query):
    return sorted(row.pk for row in listed(client, q=query))


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.PARKED])
def test_a_trace_finds_the_record_that_it_is_derived_from(reader, status):
    make_records(3, Status.COMPLETED, operation=charges.name)
    pk = record(status, account_id="alice", idempotency_key="one")
    trace = IdempotencyRecord.objects.get(pk=pk).scope.trace
    assert [pks(reader, query) for query in (trace, f"alice {trace}", f"bob {trace}")] == [[pk], [pk], []]


def test_a_trace_finds_the_first_record_and_its_consumers_records(reader):
    first = completed(account_id="alice", idempotency_key="one")
    key = first.scope.key_for(uuid4())
    consumers = [completed(account_id=account, idempotency_key=key).pk for account in ("alice", "relay")]
    assert pks(reader, first.scope.trace) == [first.pk, *consumers]
    assert pks(reader, f"alice {first.scope.trace}") == [first.pk, consumers[0]]


def test_a_key_or_an_account_that_looks_like_a_trace_is_found(reader):
    key, account = uuid4().hex, uuid4().hex
    by_key, by_account = completed(idempotency_key=key), completed(account_id=account)
    assert pks(reader, key) == [by_key.pk]
    assert pks(reader, account) == [by_account.pk]


def test_the_search_for_a_trace_continues_with_older_records(reader, monkeypatch):
    oldest = completed(account_id="alice", idempotency_key="one")
    make_records(5, Status.COMPLETED, account_id="bob", expires=HOUR)
    monkeypatch.setattr(records, "MAX_SEARCHED", 2)
    query, searches = urlencode({"q": oldest.scope.trace}), 0
    # A submitted action queries the list, too, and does not warn again.
    assert reader.post(f"{LIST}?{query}", {"action": "release"}, follow=True).status_code == 200
    while not (found := (page := reader.get(f"{LIST}?{query}")).context["cl"].result_list):
        (link,) = re.findall(r'href="\?(q=[^"]+)"', messages_on(page)[-1])
        query, searches = html.unescape(link), searches + 1
    assert ([row.pk for row in found], searches) == ([oldest.pk], 2)
    assert pks(reader, f"alice {oldest.scope.trace}") == [oldest.pk]
    assert pks(reader, uuid4().hex + " before 1") == []


def test_the_search_for_a_trace_has_a_time_limit(reader, monkeypatch):
    monkeypatch.setattr(records, "TRACE_LIMIT", 0)
    make_records(4, Status.COMPLETED, account_id="bob", expires=HOUR)
    page = reader.get(LIST, {"q": uuid4().hex})
    assert list(page.context["cl"].result_list) == []
    assert "took too long" in messages_on(page)[-1]
