"""A trace from a log line finds its records in the admin."""

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


def test_a_trace_of_an_older_record_is_found_with_its_account_only(reader, monkeypatch):
    oldest = completed(account_id="alice", idempotency_key="one")
    make_records(4, Status.COMPLETED, account_id="bob", expires=HOUR)
    for name, limit in (("MAX_SEARCHED", 4), ("TRACE_LIMIT", 0)):
        with monkeypatch.context() as patch:
            patch.setattr(records, name, limit)
            page = reader.get(LIST, {"q": oldest.scope.trace})
            assert list(page.context["cl"].result_list) == []
            assert "too large to be searched for a trace alone" in messages_on(page)[-1]
            assert reader.post(f"{LIST}?q={oldest.scope.trace}", {"action": "release"}, follow=True).status_code == 200
    assert pks(reader, f"alice {oldest.scope.trace}") == [oldest.pk]
    assert pks(reader, uuid4().hex) == []
