"""A record's history: an entry for each attempt except one that simply completed."""

import re
from datetime import timedelta
from unittest.mock import Mock

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from idempotency import PARK, REEXECUTE, Operation, claim
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.operate.sweep import recover_batches
from idempotency.store import Fence, store_for
from idempotency.store.history import MAX_ENTRIES, Appended
from tests.records import HOUR, database_now, make_records

pytestmark = pytest.mark.django_db(transaction=True)

again = Operation.declare("tests.history.again", recovery=REEXECUTE)
parks = Operation.declare("tests.history.parks", transaction=False, recovery=PARK)

SCOPE = {"account_id": "1", "key": "k", "payload": {}}


def entries(operation=again):
    kept = IdempotencyRecord.objects.get(operation=operation.name).history or ()
    return [(entry["event"], entry.get("attempt"), entry.get("why")) for entry in kept]


def run(operation=again, error=None):
    try:
        with claim(operation, **SCOPE) as claimed:
            if error is not None:
                raise error
            claimed.result = 1
    except (ValueError, KeyError):
        pass


def test_failures_and_take_overs_add_entries():
    run(error=ValueError("the card 4242 was declined"))
    run(error=KeyError("card"))
    run()
    run(parks, error=ValueError("no answer"))
    assert entries() == [
        ("released", 1, "ValueError"),
        ("taken_over", 2, None),
        ("released", 2, "KeyError"),
        ("taken_over", 3, None),
    ]
    assert entries(parks) == [("parked", 1, "ValueError")]


@pytest.mark.parametrize(
    ("operation", "status", "by"),
    [(again, "recoverable", "a sweep"), (parks, "parked", "a sweep"), (parks, "parked", "a request")],
)
def test_a_settled_abandoned_claim_adds_an_entry(operation, status, by):
    make_records(1, Status.IN_PROGRESS, operation=operation.name, lease=-HOUR, expires=HOUR)
    if by == "a sweep":
        next(recover_batches())
    else:
        assert store_for("default").park_abandoned(Fence.of(IdempotencyRecord.objects.get()))
    assert IdempotencyRecord.objects.get().status == status
    assert entries(operation) == [("lease_over", 1 if by == "a request" else None, None)]


def test_a_request_after_the_retention_keeps_earlier_entries():
    run(error=ValueError())
    IdempotencyRecord.objects.update(expires_at=IdempotencyRecord.objects.get().created_at)
    run()
    assert entries() == [("released", 1, "ValueError"), ("started_over", 2, None)]


def test_an_entry_is_dated_by_the_database(monkeypatch):
    ahead = timezone.now() + timedelta(days=365)
    monkeypatch.setattr(timezone, "now", lambda: ahead)
    before = database_now()
    run(error=ValueError())
    (entry,) = IdempotencyRecord.objects.get().history
    assert entry["at"][:10] in {f"{moment:%Y-%m-%d}" for moment in (before, database_now())}


def test_only_the_latest_entries_are_kept():
    last = MAX_ENTRIES // 2 + 2
    for _ in range(last):
        run(error=ValueError())
    # The first attempt is not in it, so two entries of each later attempt follow the first release.
    taken = [(attempt, event) for attempt in range(2, last + 1) for event in ("taken_over", "released")]
    assert [(attempt, event) for event, attempt, _ in entries()] == taken[-MAX_ENTRIES:]
    assert entries()[-1] == ("released", last, "ValueError")


def test_a_first_execution_and_a_replay_write_no_history():
    with CaptureQueriesContext(connection) as captured:
        run()
        run()
    assert IdempotencyRecord.objects.get().history is None
    writes = [query["sql"] for query in captured if re.search("INSERT|UPDATE", query["sql"])]
    assert writes
    assert not [sql for sql in writes if 'history" =' in sql or "history =" in sql]


def test_an_unknown_database_keeps_no_history():
    compiler = Mock()
    compiler.compile.side_effect = [("history", []), ("%s", ["{}"]), ("now", [])]
    assert Appended("released").as_sql(compiler, Mock(vendor="oracle")) == ("history", [])
