"""``stats()``: exact on a small table, bounded on a huge one, with the precision reported."""

import json
import re
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from idempotency import extensions, signals
from idempotency.contrib.dashboard.counting import counters
from idempotency.lifecycle import Status
from idempotency.management.commands import idempotency_stats
from idempotency.models import IdempotencyRecord
from idempotency.operate import statistics
from idempotency.operate.purge import purge_batches
from idempotency.operate.statistics import Number, Precision
from idempotency.store import TableSize, upkeep_for
from tests.commands import run_command
from tests.database.counters.counting import count, operation
from tests.database.statements import execute, fill, most_rows_read
from tests.records import HOUR, from_now, make_records

pytestmark = pytest.mark.django_db(transaction=True)


def numbers():
    return dict(statistics.stats())


def test_an_empty_table_is_empty():
    counted = ("records", "in_progress", "recoverable", "completed", "parked", "abandoned")
    measured = ("overdue", "oldest_in_progress", "most_attempts")
    expected = dict.fromkeys(counted, Number(0, Precision.EXACT)) | dict.fromkeys(
        measured, Number(None, Precision.EXACT)
    )
    assert numbers().items() >= (expected | {"replay_rate": Number(None, Precision.RECENT)}).items()


def test_a_small_table_is_counted_exactly():
    make_records(5)
    make_records(1, Status.RECOVERABLE)
    make_records(2, Status.PARKED)
    make_records(1, Status.IN_PROGRESS, lease=HOUR, created_at=from_now(-3 * HOUR))
    make_records(2, Status.IN_PROGRESS, lease=-timedelta(minutes=5), attempt=4)
    make_records(1, Status.PARKED, operation="payouts.create")
    with CaptureQueriesContext(connection) as captured:
        found = numbers()
    queries = [one for one in captured if "idempotency_record" in one["sql"] and "pg_dist_partition" not in one["sql"]]
    assert len(queries) <= 5
    assert found["parked"].by_operation == {"charges.create": 2, "payouts.create": 1}
    assert found["abandoned"].by_operation == {"charges.create": 2}
    counts = {"records": 12, "in_progress": 3, "recoverable": 1, "completed": 5, "parked": 3, "abandoned": 2}
    for name, number in {**counts, "most_attempts": 4}.items():
        assert found[name] == Number(number, Precision.EXACT)
    for name, age in (("overdue", 300), ("oldest_in_progress", 3 * 3600)):
        assert found[name].kind is Precision.EXACT
        assert found[name].value == pytest.approx(age, abs=60)


def test_the_purge_is_overdue_since_the_oldest_record_that_it_would_delete():
    make_records(1, Status.PARKED, expires=-9 * HOUR)  # waits for a decision
    make_records(1, Status.IN_PROGRESS, lease=-HOUR, expires=-9 * HOUR)  # waits for a sweep
    make_records(1, expires=HOUR)
    assert statistics.purge_overdue() == 0
    make_records(1, expires=-2 * HOUR)
    make_records(1, Status.RECOVERABLE, expires=-5 * HOUR)
    assert statistics.purge_overdue() == pytest.approx(5 * 3600, abs=60)
    assert [batch.deleted for batch in purge_batches()] == [2]
    assert statistics.purge_overdue() == 0


@pytest.mark.failure_112
def test_recent_records_of_undeclared_operations_are_counted_up_to_a_bound(monkeypatch):
    make_records(2, operation="charges.renamed", expires=HOUR)
    make_records(1, operation="charges.renamed", expires=-HOUR)
    make_records(1, operation=operation.name, expires=HOUR)
    counted = statistics.undeclared()
    assert (counted, counted.by_operation) == (Number(2, Precision.EXACT), {"charges.renamed": 2})
    assert "No code declares operation 'charges.renamed', which has 2 of the newest records." in run()
    monkeypatch.setattr(statistics, "MAX_COUNTED", 3)
    assert statistics.undeclared() == Number(1, Precision.AT_LEAST)


def test_a_running_lease_is_not_overdue():
    make_records(1, Status.IN_PROGRESS, lease=HOUR)
    assert numbers()["overdue"] == Number(0.0, Precision.EXACT)


def test_counting_stops_at_a_bound_and_reports_it(monkeypatch):
    monkeypatch.setattr(statistics, "MAX_COUNTED", 4)
    if connection.vendor == "postgresql":
        execute("TRUNCATE idempotency_record CASCADE")  # so that nothing is estimated
    make_records(7, Status.PARKED)
    make_records(4, Status.IN_PROGRESS, lease=-HOUR)
    make_records(3, Status.RECOVERABLE)
    found = numbers()
    for name in ("parked", "in_progress", "abandoned"):
        assert found[name] == Number(4, Precision.AT_LEAST)
    assert found["oldest_in_progress"].kind is found["most_attempts"].kind is Precision.AT_LEAST
    assert found["recoverable"] == Number(3, Precision.EXACT)
    assert found["records"] == Number(4, Precision.AT_LEAST)
    assert found["completed"] == Number(0, Precision.AT_LEAST)  # true, but imprecise


@pytest.mark.postgres
def test_a_big_table_is_estimated_and_not_read(monkeypatch):
    monkeypatch.setattr(statistics, "MAX_COUNTED", 500)
    fill(20_000)
    make_records(3, Status.PARKED)
    make_records(2, Status.IN_PROGRESS, lease=-HOUR)
    found = numbers()
    assert found["records"].kind is found["completed"].kind is Precision.ESTIMATE
    assert found["records"].value == pytest.approx(20_005, rel=0.05)
    assert found["completed"].value == pytest.approx(20_000, rel=0.05)
    assert (found["parked"], found["in_progress"]) == (Number(3, Precision.EXACT), Number(2, Precision.EXACT))
    assert most_rows_read(statistics.stats) <= 500


@pytest.mark.sqlite
@pytest.mark.parametrize("status", ["in_progress", "recoverable", "parked"])
def test_unfinished_records_are_found_through_their_index(status):
    plan = IdempotencyRecord.objects.filter(status=status).order_by("lease_expires_at").explain()
    assert "idempotency_record_unfinished" in plan


def happen():
    for event, times in ((signals.claimed, 3), (signals.taken_over, 1), (signals.replayed, 12), (signals.parked, 2)):
        count(times, event)
    count(1, signals.recovered, of=None)
    counters.flush()


def test_events_are_counted():
    happen()
    happen()
    found = numbers()
    recent = {name: number.value for name, number in found.items() if number.kind is Precision.RECENT}
    happened = {"claims": 6, "take_overs": 2, "replays": 24, "replay_rate": 0.75, "recoveries": 2, "parkings": 4}
    not_happened = ("completions", "conflicts", "reused_keys", "releases", "unrecorded", "lease_losses")
    assert recent == happened | dict.fromkeys(not_happened, 0)


def test_every_counted_event_has_a_statistic():
    assert set(statistics.EVENTS.values()) == set(signals.EVENTS)
    recent = {name for name, number in numbers().items() if number.kind is Precision.RECENT}
    assert set(statistics.EVENTS) | {"replay_rate"} == recent


def run(**options):
    return run_command("idempotency_stats", **options)[1]


def test_the_command_shows_a_table():
    make_records(1_234)
    make_records(2, Status.PARKED)
    make_records(1, Status.IN_PROGRESS, lease=-timedelta(seconds=90))
    happen()
    table = [" ".join(line.split()) for line in run()]
    shown = ["completed 1,234 exact", "parked 2 exact", "replays 12 recent", "replay rate 0.75 recent"]
    assert set(shown) < set(table)
    assert any(re.fullmatch(r"overdue (9|1\d)\d(\.\d+)? s exact", line) for line in table), table
    postgresql, other = r"table bytes [\d,]+ B exact", "table bytes - unknown: this database does not report it"
    size = postgresql if connection.vendor == "postgresql" else other
    assert re.fullmatch(size, table[0])


def test_the_command_writes_json():
    make_records(2, Status.PARKED)
    data = json.loads("".join(run(json=True)))
    assert data["parked"] == {"value": 2, "kind": "exact", "by_operation": {"charges.create": 2}}
    undeclared = {"value": 0, "kind": "exact", "by_operation": {}}
    overdue = {"value": 0.0, "kind": "exact"}
    assert data == statistics.stats().as_dict() | {"purge_overdue": overdue, "undeclared": undeclared}
    assert set(data) > set(idempotency_stats.UNITS)


def test_the_command_explains_why_a_number_is_unknown(monkeypatch):
    monkeypatch.setattr(extensions, "_extensions", {})
    monkeypatch.setattr(type(upkeep_for("default")), "measure", lambda upkeep: TableSize(None, None))
    table = [" ".join(line.split()) for line in run()]
    assert "table bytes - unknown: this database does not report it" in table
    assert "replays - unknown: 'idempotency.contrib.dashboard' is not in INSTALLED_APPS" in table
