"""``manage.py recover_idempotency``: arguments, report, exit codes, and the cost of a sweep. Scenario 26."""

from collections import Counter
from functools import partial

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from idempotency import Operation, Reconcile, Unknown, signals
from idempotency.lifecycle import Status
from idempotency.management.commands import recover_idempotency
from idempotency.models import IdempotencyRecord
from idempotency.operate import sweep
from idempotency.operate.sweep import abandoned, recover_batches
from idempotency.protocol.faults import fault_point
from tests.commands import run_command
from tests.database.claiming import FINDINGS, again, asks, parks
from tests.database.statements import fill, most_rows_read
from tests.operations import receiving
from tests.records import HOUR, MINUTE, abandon, database_now, from_now, make_records

pytestmark = pytest.mark.django_db(transaction=True)

patient = Operation.declare(
    "tests.recover.patient", transaction=False, recovery=Reconcile(lambda record: Unknown(), max_attempts=100)
)


def states():
    return Counter(IdempotencyRecord.objects.values_list("status", flat=True))


recover = partial(run_command, "recover_idempotency")


def test_the_command_settles_abandoned_claims_and_reports_them(monkeypatch):
    monkeypatch.setitem(FINDINGS, "unknown", Unknown())
    abandon(3, again)
    abandon(2, parks)
    abandon(1, asks)
    abandon(1, asks, idempotency_key="unknown", attempt=6)  # reconciled again in two minutes
    make_records(1, Status.IN_PROGRESS, lease=HOUR)
    settled = "Settled 7 claims: 3 recoverable, 1 completed, 2 parked, 1 postponed."
    assert recover() == (0, [settled], [])
    assert states() == {"recoverable": 3, "parked": 2, "completed": 1, "in_progress": 2}
    assert recover() == (0, ["Settled 0 claims: 0 recoverable, 0 completed, 0 parked."], [])


def test_the_claim_abandoned_longest_is_settled_first():
    (late,) = abandon(1, again, lease=-MINUTE)
    abandon(1, parks, lease=-9 * HOUR)  # another declaration doesn't need another batch
    assert next(recover_batches(batch_size=1)).settled == 1
    assert abandoned().get().pk == late


def test_a_claim_taken_over_since_its_selection_is_left_alone(monkeypatch):
    """Databases without SKIP LOCKED lock no rows, so another process may take over. Here this process does."""
    taken_over = {"attempt": 2, "lease_expires_at": from_now(HOUR)}
    monkeypatch.setitem(fault_point, "sweep.selected", lambda: IdempotencyRecord.objects.update(**taken_over) and None)
    for operation in (again, parks, asks):
        abandon(2, operation)
    with receiving(signals.recovered) as recovered, receiving(signals.parked) as parked:
        assert next(recover_batches()).touched == 0
    assert states() == {"in_progress": 6}
    assert recovered == parked == []


def test_the_pause_between_calls_of_a_reconciler_has_a_bound():
    abandon(1, patient, attempt=30)
    assert next(recover_batches()).postponed == 1
    assert MINUTE < IdempotencyRecord.objects.get().lease_expires_at - database_now() < 5 * MINUTE


def test_claims_of_unknown_operations_stay_and_are_reported():
    abandon(1, again)
    abandon(2, "tests.recover.elsewhere")
    code, lines, errors = recover()
    assert (code, lines) == (4, ["Settled 1 claim: 1 recoverable, 0 completed, 0 parked."])
    skipped = "Skipped 2 claims of operation 'tests.recover.elsewhere', which is not declared in this process. "
    assert errors == [f"{skipped}Declare it in an app's operations.py, or import the module of its task."]
    assert states() == {"recoverable": 1, "in_progress": 2}
    assert recover(verbosity=0)[:2] == (4, [])


def test_a_dry_run_counts_and_settles_nothing(monkeypatch):
    abandon(2, again)
    abandon(1, parks)
    abandon(1, asks)
    abandon(1, "tests.recover.elsewhere")
    expected = [
        "5 claims abandoned.",
        "  tests.again: 2 (reexecute)",
        "  tests.asks: 1 (reconcile)",
        "  tests.parks: 1 (park)",
        "  tests.recover.elsewhere: 1 (skipped, not declared here)",
    ]
    assert recover(dry_run=True) == (0, expected, [])
    monkeypatch.setattr(recover_idempotency, "MAX_LISTED", 5)
    assert recover(dry_run=True)[1][0] == "At least 5 claims abandoned."
    assert states() == {"in_progress": 5}


@pytest.mark.postgres
def test_a_sweep_reads_only_abandoned_claims():
    """The size of the table and the age of the records don't matter: the index has only unfinished records."""
    fill(20_000)
    old = IdempotencyRecord.objects.filter(idempotency_key__in=["bulk-1", "bulk-10000", "bulk-19999"])
    old.update(status=Status.IN_PROGRESS, operation=again.name, attempt=2, lease_expires_at=from_now(-MINUTE))
    abandon(10, again)
    make_records(30, Status.IN_PROGRESS, lease=HOUR)
    make_records(30, Status.PARKED)
    found = []
    assert most_rows_read(lambda: found.append(next(recover_batches()).recoverable)) <= 13
    assert found == [13]


def test_a_sweep_that_declares_no_operation_of_the_claims_reads_them_once(monkeypatch):
    abandon(3, "tests.recover.elsewhere")
    with CaptureQueriesContext(connection) as captured:
        (batch,) = recover_batches()
    assert batch.unknown_operations == {"tests.recover.elsewhere": 3}
    reads = [one["sql"] for one in captured if one["sql"].startswith("SELECT") and "lease_expires_at" in one["sql"]]
    assert len(reads) == 1
    # If there are too many to list, the search goes on from the last one listed.
    monkeypatch.setattr(sweep, "MAX_LISTED", 2)
    abandon(1, again)
    batches = list(recover_batches())
    assert [(batch.settled, batch.unknown_operations.total()) for batch in batches] == [(1, 2)]
