"""A trace, which a log line has, finds its records in the admin."""

from uuid import uuid4

import pytest

from idempotency.admin import traces
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from tests.http.admin.pages import LIST, charges, listed, log_in, record, said
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


def test_a_trace_finds_the_records_of_consumers_with_the_first_one(reader):
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


def test_every_page_of_records_is_searched(reader, monkeypatch):
    monkeypatch.setattr(traces, "PAGE", 2)
    oldest = completed(account_id="alice", idempotency_key="one")
    make_records(4, Status.COMPLETED, account_id="alice", expires=HOUR)
    assert pks(reader, oldest.scope.trace) == [oldest.pk]
    assert pks(reader, uuid4().hex) == []


def test_a_search_that_ran_out_of_time_says_how_far_it_got(reader, monkeypatch):
    monkeypatch.setattr(traces, "PAGE", 2)
    oldest = completed(account_id="alice", idempotency_key="one")
    make_records(4, Status.COMPLETED, account_id="alice", expires=HOUR)
    read = traces._read

    def read_one_page(page, end, searched, reached):
        return read(page, 0 if searched else end, searched, reached)

    monkeypatch.setattr(traces, "_read", read_one_page)
    query = {"q": f"alice {oldest.scope.trace}"}
    page = reader.get(LIST, query)
    (warning,) = said(page)
    assert "Only the newest 2 records were searched for this trace, back to 20" in warning
    assert list(page.context["cl"].result_list) == []
    monkeypatch.setattr(traces, "LIMIT", 0)
    (warning,) = said(reader.get(LIST, query))
    assert "back to –" in warning
    assert reader.post(f"{LIST}?q=alice+{oldest.scope.trace}", {"action": "release"}, follow=True).status_code == 200
