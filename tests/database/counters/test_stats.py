"""``stats()``: right on a small table, bounded on a huge one, and honest about which it is."""

import json
import re
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from idempotency import signals
from idempotency.contrib.dashboard.counting import PURGE_ENDED, counters, this_hour
from idempotency.contrib.dashboard.models import IdempotencyCounter
from idempotency.lifecycle import Status
from idempotency.management.commands import idempotency_stats
from idempotency.management.commands.idempotency_stats import Condition
from idempotency.models import IdempotencyRecord
from idempotency.operate import statistics
from idempotency.operate.purge import purge_once
from idempotency.operate.statistics import Number, Precision
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
        seen = numbers()
    asked = [one for one in captured if "idempotency_record" in one["sql"] and "pg_dist_partition" not in one["sql"]]
    assert len(asked) <= 5
    assert seen["parked"].by_operation == {"charges.create": 2, "payouts.create": 1}
    assert seen["abandoned"].by_operation == {"charges.create": 2}
    counts = {"records": 12, "in_progress": 3, "recoverable": 1, "completed": 5, "parked": 3, "abandoned": 2}
    for name, number in {**counts, "most_attempts": 4}.items():
        assert seen[name] == Number(number, Precision.EXACT)
    for name, age in (("overdue", 300), ("oldest_in_progress", 3 * 3600)):
        assert seen[name].kind is Precision.EXACT
        assert seen[name].value == pytest.approx(age, abs=60)


def test_the_time_since_the_last_purge_is_told_to_the_hour():
    """Without any purge it is the time since the first count. So an operator sees that no purge is scheduled."""
    assert numbers()["since_purge"] == Number(None, Precision.NEVER)

    def row(hours_ago, event, name=""):
        IdempotencyCounter.objects.create(hour=this_hour() - hours_ago, operation=name, event=event, total=1)

    row(300, "claimed", operation.name)
    row(1, "claimed", operation.name)
    for hours_ago, ended in ((300, None), (50, 50), (2, 2)):
        if ended:
            row(ended, PURGE_ENDED)
        since = numbers()["since_purge"]
        assert since.kind is (Precision.RECENT if ended else Precision.NEVER)
        _, shown, _ = run_command("idempotency_stats")
        [line] = [line.split() for line in shown if line.startswith("last complete purge")]
        assert line[3:] == ([str(round(since.value / 3600)), "h", "recent"] if ended else ["never"])
        assert since.value == round(hours_ago * 3600 + statistics.time.time() % 3600)
    assert not purge_once(batch_size=1).deleted
    assert numbers()["since_purge"].value < 3660
    code, _, errors = run_command("idempotency_stats", "--fail-if", "since_purge < 3660")
    assert (code, len(errors)) == (1, 1)


def test_a_lease_that_runs_is_not_overdue():
    make_records(1, Status.IN_PROGRESS, lease=HOUR)
    assert numbers()["overdue"] == Number(0.0, Precision.EXACT)


def test_counting_stops_at_a_bound_and_says_so(monkeypatch):
    monkeypatch.setattr(statistics, "MAX_COUNTED", 4)
    if connection.vendor == "postgresql":
        execute("TRUNCATE idempotency_record CASCADE")  # and so nothing is estimated of it
    make_records(7, Status.PARKED)
    make_records(4, Status.IN_PROGRESS, lease=-HOUR)
    make_records(3, Status.RECOVERABLE)
    seen = numbers()
    for name in ("parked", "in_progress", "abandoned"):
        assert seen[name] == Number(4, Precision.AT_LEAST)
    assert seen["oldest_in_progress"].kind is seen["most_attempts"].kind is Precision.AT_LEAST
    assert seen["recoverable"] == Number(3, Precision.EXACT)
    assert seen["records"] == Number(4, Precision.AT_LEAST)
    assert seen["completed"] == Number(0, Precision.AT_LEAST)  # true, if not much


@pytest.mark.postgres
def test_a_big_table_is_estimated_and_not_read(monkeypatch):
    monkeypatch.setattr(statistics, "MAX_COUNTED", 500)
    fill(20_000)
    make_records(3, Status.PARKED)
    make_records(2, Status.IN_PROGRESS, lease=-HOUR)
    seen = numbers()
    assert seen["records"].kind is seen["completed"].kind is Precision.ESTIMATE
    assert seen["records"].value == pytest.approx(20_005, rel=0.05)
    assert seen["completed"].value == pytest.approx(20_000, rel=0.05)
    assert (seen["parked"], seen["in_progress"]) == (Number(3, Precision.EXACT), Number(2, Precision.EXACT))
    assert most_rows_read(statistics.stats) <= 500


@pytest.mark.sqlite
@pytest.mark.parametrize("status", ["in_progress", "recoverable", "parked"])
def test_the_few_that_are_not_completed_are_found_by_their_index(status):
    plan = IdempotencyRecord.objects.filter(status=status).order_by("lease_expires_at").explain()
    assert "idempotency_record_unfinished" in plan


def happen():
    for event, times in ((signals.claimed, 3), (signals.taken_over, 1), (signals.replayed, 12), (signals.parked, 2)):
        count(times, event)
    count(1, signals.recovered, of=None)


def test_what_has_happened_is_counted_written_or_not():
    happen()
    counters.flush()
    happen()
    seen = numbers()
    recent = {name: number.value for name, number in seen.items() if number.kind is Precision.RECENT}
    happened = {"claims": 6, "take_overs": 2, "replays": 24, "replay_rate": 0.75, "recoveries": 2, "parkings": 4}
    not_happened = ("completions", "conflicts", "reused_keys", "releases", "unrecorded", "lease_losses")
    assert (seen["since_purge"].kind, seen["since_purge"].value < 3660) == (Precision.NEVER, True)
    assert recent == happened | dict.fromkeys(not_happened, 0)


def test_every_event_that_is_counted_has_a_name_here():
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
    shown = ["completed 1,234 exact", "parked 2 exact", "replays 12 recent", "replay rate 75.0% recent"]
    assert set(shown) < set(table)
    assert any(re.fullmatch(r"longest overdue (9|1\d)\d s exact", line) for line in table), table
    size = r"table and indexes [\d,.]+ MB exact" if connection.vendor == "postgresql" else "table and indexes - unknown"
    assert re.fullmatch(size, table[0])


def test_the_command_shows_what_has_happened_by_operation():
    assert (statistics.by_operation(), run(by_operation=True)) == ({}, ["Nothing has happened yet."])
    happen()
    make_records(1, Status.IN_PROGRESS, lease=-HOUR, operation="payouts.create")
    nothing = dict.fromkeys([*statistics.EVENTS, "parked", "abandoned"], 0)
    assert statistics.by_operation() == {
        "": {**nothing, "recoveries": 1},
        operation.name: {**nothing, "claims": 3, "take_overs": 1, "replays": 12, "parkings": 2},
        "payouts.create": {**nothing, "abandoned": 1},
    }
    assert [" ".join(line.split()) for line in run(by_operation=True)] == [
        "(settled by an operator, the operation was not known)",
        "recoveries 1",
        *("payouts.create", "abandoned claims 1"),
        *(operation.name, "claims 3", "take-overs 1", "replays 12", "parkings 2"),
    ]
    assert json.loads("".join(run(by_operation=True, json=True))) == statistics.by_operation()


def test_the_command_writes_json():
    make_records(2, Status.PARKED)
    data = json.loads("".join(run(json=True)))
    assert data["parked"] == {"value": 2, "kind": "exact", "by_operation": {"charges.create": 2}}
    assert data == statistics.stats().as_dict()
    assert set(data) == set(idempotency_stats.LABELS) == {name for name, _ in statistics.stats()}


@pytest.mark.parametrize(
    ("conditions", "complaints"),
    [
        (["parked > 2"], []),
        (["parked>1", "abandoned>=1", "replays == 12"], ["parked > 1", "replays == 12"]),
        (["overdue < 1"], []),  # there is nothing to measure
        (["recoverable > 9", "recoverable == 9", "recoverable <= 3"], ["recoverable > 9", "recoverable == 9"]),
    ],
)
def test_the_command_fails_if_a_condition_is_true(monkeypatch, conditions, complaints):
    """A number that was counted up to a bound only may be anything above it, and an alarm must not miss that."""
    make_records(2, Status.PARKED)
    monkeypatch.setattr(statistics, "MAX_COUNTED", 4)
    make_records(4, Status.RECOVERABLE)
    happen()
    code, _, errors = run_command("idempotency_stats", fail_if=list(map(Condition.parse, conditions)))
    assert (code, [line.partition(" is true")[0] for line in errors]) == (1 if complaints else 0, complaints)


def test_a_condition_is_checked_for_each_operation():
    make_records(1, Status.PARKED, operation="payouts.create")
    happen()
    code, _, errors = run_command("idempotency_stats", "--by-operation", "--fail-if", "parked > 0")
    assert (code, errors) == (1, ["payouts.create: parked > 0 is true: parked is 1."])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fail-if", "parked"], "'parked' is not a comparison"),
        (["--fail-if", "parked > x"], "is not a comparison"),
        (["--fail-if", "__import__ > 0"], "there is no number '__import__'"),
        (["--fail-if", "records > 0", "--by-operation"], "records is not known for each operation"),
        pytest.param(
            ["--fail-if", "table_bytes > 0"], "This database can't tell table_bytes", marks=pytest.mark.sqlite
        ),
    ],
)
def test_a_condition_that_can_not_be_checked_is_a_mistake_of_usage(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        idempotency_stats.Command().run_from_argv(["manage.py", "idempotency_stats", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
