"""The purge deletes what is past retention, in bounded batches, and never a claim; and ``purge_idempotency``."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError
from django.db import connection, transaction
from django.utils import timezone

from idempotency.lifecycle import Status
from idempotency.management import running
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.operate.purge import PurgeResult, due, purge_body_batches, purge_once
from idempotency.outbox.models import MessageStatus, OutboxMessage
from idempotency.outcome import BODY_GONE
from idempotency.signals import purged
from tests.commands import run_command
from tests.concurrency.racing import PATIENCE
from tests.database import processes
from tests.outbox import make_messages, statuses
from tests.records import HOUR, from_now, make_bodies, make_records, remaining

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("lease", [HOUR, -HOUR, None], ids=["live", "abandoned", "without lease"])
@pytest.mark.parametrize("include_parked", [False, True])
def test_a_claim_is_never_purged(lease: timedelta | None, include_parked: bool) -> None:
    kept = make_records(3, Status.IN_PROGRESS, lease=lease)
    assert purge_once(include_parked=include_parked) == PurgeResult()
    assert remaining() == {*kept}


@pytest.mark.failure_5
def test_the_application_clock_plays_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = make_records(1, expires=HOUR)
    make_records(1)
    ahead = timezone.now() + timedelta(days=365)
    monkeypatch.setattr(timezone, "now", lambda: ahead)
    assert purge_once().deleted == 1
    assert remaining() == {*kept}


@pytest.mark.scenario_27
@pytest.mark.failure_30
def test_steps_go_with_their_records_and_no_others() -> None:
    gone, parked, *kept = [*make_records(1), *make_records(1, Status.PARKED), *make_records(1, expires=HOUR)]
    other_account, *_ = make_records(1, Status.PARKED, account_id="2")
    for pk, account in IdempotencyRecord.objects.values_list("pk", "account_id"):
        IdempotencyStep.objects.create(account_id=account, record_id=pk, name="charge", result="1")
    # An id that another account has, too, as after rows were copied between databases.
    IdempotencyStep.objects.create(account_id="2", record_id=gone, name="charge", result="1")
    assert purge_once().deleted == 1
    left = IdempotencyStep.objects.values_list("account_id", "record_id")
    assert {*left} == {("1", parked), ("2", other_account), ("2", gone), *(("1", pk) for pk in kept)}


def test_records_that_are_kept_do_not_keep_a_batch_from_those_behind_them() -> None:
    make_records(3, expires=-3 * HOUR)
    kept = make_records(9, Status.PARKED, expires=-2 * HOUR)
    make_records(3)
    while deleted := purge_once(batch_size=2).deleted:
        assert deleted <= 2
    assert remaining() == {*kept}


@pytest.mark.sqlite
def test_steps_are_found_by_their_accounts_and_not_by_every_pair_of_account_and_record() -> None:
    make_records(3)
    plans: list[str] = []

    def explain(execute: Any, statement: str, parameters: Any, many: bool, context: Any) -> Any:
        if statement.startswith("DELETE") and "idempotency_step" in statement:
            plans.extend(row[3] for row in execute(f"EXPLAIN QUERY PLAN {statement}", parameters, many, context))
        return execute(statement, parameters, many, context)

    with connection.execute_wrapper(explain):
        assert purge_once().deleted == 3
    assert any("(account_id=?)" in plan for plan in plans), plans


# The command: records first and then sent messages, its report, its exit codes, and its load


NOT_DUE = {MessageStatus.SENT: {"sent": -HOUR}, MessageStatus.DEAD: {"due": -96 * HOUR}, MessageStatus.PENDING: {}}


def purge(**options: Any) -> tuple[int, list[str]]:
    """Run the command: its exit code and the lines of its output."""
    return run_command("purge_idempotency", **options)[:2]


def make_sent(count: int) -> None:
    """Messages that were sent longer ago than the retention."""
    make_messages(count, MessageStatus.SENT, sent=-96 * HOUR)


def test_it_purges_all_that_is_due_and_says_so() -> None:
    make_records(1_234)
    make_sent(1)
    kept = make_records(2, expires=HOUR) + make_records(2, Status.RECOVERABLE, expires=HOUR)
    kept += make_records(2, Status.PARKED) + make_records(2, Status.IN_PROGRESS)
    for status, times in NOT_DUE.items():
        make_messages(1, status, **times)
    assert purge() == (
        0,
        ["Purged 1,234 records from database 'default'.", "Purged 1 sent message from database 'default'."],
    )
    assert remaining() == {*kept}
    assert {status for status, _ in statuses()} == {*NOT_DUE}
    assert purge() == (0, ["Purged 0 records from database 'default'."])
    assert purge(verbosity=0) == (0, [])


def test_a_dry_run_counts_and_deletes_nothing() -> None:
    assert purge(dry_run=True) == (0, ["Would purge 0 records from database 'default'."])
    make_records(3)
    make_records(2, Status.RECOVERABLE)
    make_records(2, Status.PARKED)
    make_records(1, Status.IN_PROGRESS)
    make_records(7, expires=HOUR)
    make_sent(5)
    before = remaining()
    would = "Would purge {} from database 'default'."
    claims, parked = "Would keep 1 record past retention: in progress.", "Would keep 2 records past retention: parked."
    messages = would.format("5 sent messages")
    assert purge(dry_run=True) == (0, [would.format("5 records"), claims, parked, messages])
    assert purge(dry_run=True, include_parked=True) == (0, [would.format("7 records"), claims, messages])
    assert (remaining(), OutboxMessage.objects.count()) == (before, 5)
    assert (due().count(), due(include_parked=True).count()) == (5, 7)
    assert purge(include_parked=True)[1][0] == "Purged 7 records from database 'default'."


@pytest.mark.parametrize(
    ("records", "messages", "more"),
    [(5, 0, True), (0, 5, True), (4, 4, False), (3, 3, False)],
    ids=["records are due", "messages are due", "the last batch was full", "the last batch was not full"],
)
def test_a_run_tells_whether_its_last_batches_have_left_anything(records: int, messages: int, more: bool) -> None:
    make_records(records)
    make_sent(messages)
    code, lines = purge(batch_size=2, max_batches=2)
    assert (code, "Stopped by --max-batches 2. More is due." in lines) == ((3, True) if more else (0, False))
    assert len(remaining()) + OutboxMessage.objects.count() == int(more)


def test_a_verbose_run_reports_each_batch() -> None:
    make_records(1)
    make_sent(2)
    # Where only an empty batch tells that nothing more is due, it has a line, too.
    assert [*dict.fromkeys(purge(batch_size=1, verbosity=2)[1])] == [
        "So far: Purged 1 record from database 'default'.",
        "Purged 1 record from database 'default'.",
        "So far: Purged 1 sent message from database 'default'.",
        "So far: Purged 2 sent messages from database 'default'.",
        "Purged 2 sent messages from database 'default'.",
    ]


@contextmanager
def after_each_batch(call: Callable[[], object]) -> Iterator[None]:
    def receive(**arguments: Any) -> None:
        call()

    purged.connect(receive)
    try:
        yield
    finally:
        purged.disconnect(receive)


def test_what_falls_due_after_the_last_batch_is_left_to_the_next_run() -> None:
    make_records(1)
    with after_each_batch(make_records):
        assert purge() == (0, ["Purged 1 record from database 'default'."])
    assert len(remaining()) == 1


def test_a_signal_ends_a_purge_before_its_messages() -> None:
    make_records(1)
    make_sent(1)
    with (
        after_each_batch(lambda: signal.raise_signal(signal.SIGTERM)),
        pytest.raises(CommandError, match="Stopped by SIGTERM") as stopped,
    ):
        purge()
    assert stopped.value.returncode == 143
    assert (remaining(), OutboxMessage.objects.count()) == (set(), 1)


@pytest.mark.parametrize("pause", [-0.1, 3600.1, float("nan"), float("inf")])
def test_a_wrong_pause_is_named_and_nothing_is_done(pause: float) -> None:
    ids = make_records(1)
    with pytest.raises(CommandError, match="--pause must be between 0 and 3600 seconds") as refused:
        purge(pause=pause)
    assert refused.value.returncode == 2
    assert remaining() == {*ids}


def test_a_pause_lies_between_batches_only(monkeypatch: pytest.MonkeyPatch) -> None:
    make_records(25)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(slept))
    assert purge(batch_size=10, pause=1.0)[0] == 0
    assert sum(slept) == pytest.approx(2.0)
    assert max(slept) <= running.SLICE


# Killed in the middle, and run again

KILLED = """
import os, signal
import django
django.setup()
from django.core.management import call_command
from idempotency.protocol.faults import fault_point
reached = []
def selected():
    reached.append(1)
    if len(reached) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
fault_point["purge.selected"] = selected
call_command("purge_idempotency", batch_size=5)
"""


@pytest.mark.scenario_27
def test_a_purge_that_is_killed_in_a_batch_has_lost_it_as_a_whole_and_is_simply_run_again() -> None:
    ids = make_records(30)
    for pk in ids:
        IdempotencyStep.objects.create(account_id="1", record_id=pk, name="charge", result="1")
    killed = processes.start(KILLED)
    killed.communicate(timeout=PATIENCE)
    assert killed.returncode == -signal.SIGKILL
    with transaction.atomic():
        list(IdempotencyRecord.objects.select_for_update())  # waits for the end of the killed process's session
    assert remaining() == {*ids[10:]} == {*IdempotencyStep.objects.values_list("record_id", flat=True)}
    assert purge(batch_size=5) == (0, ["Purged 20 records from database 'default'."])
    assert not IdempotencyStep.objects.exists()


# Responses past a retention of their own are deleted, and their records stay


def gone() -> set[int]:
    bodies = IdempotencyRecord.objects.filter(body_expires_at=None).values_list("pk", "response_body")
    return {pk for pk, body in bodies if body == BODY_GONE}


def purge_bodies() -> list[int]:
    return [batch.deleted for batch in purge_body_batches()]


def test_what_is_due_is_deleted_and_the_rest_of_the_record_stays() -> None:
    due = make_bodies(10)
    make_bodies(1, due=-HOUR)  # is not due yet
    make_records(1, expires=HOUR)  # is kept as long as its record
    IdempotencyRecord.objects.filter(pk__in=make_bodies(1)).update(status=Status.PARKED)  # is not completed
    before = IdempotencyRecord.objects.values().get(pk=due[0])
    assert purge_bodies() == [10]
    assert gone() == {*due}
    changed = {"response_body": BODY_GONE, "response_headers": [], "error": None, "body_expires_at": None}
    assert IdempotencyRecord.objects.values().get(pk=due[0]) == before | changed


def test_what_the_steps_tell_is_deleted_with_the_response() -> None:
    due, kept = make_bodies(1) + make_bodies(1, due=-HOUR)
    for pk in (due, kept):
        IdempotencyStep.objects.create(account_id="1", record_id=pk, name="charge", result="1")
    assert purge_bodies() == [1]
    assert IdempotencyStep.objects.get().record_id == kept


def test_the_command_purges_records_then_responses_then_messages() -> None:
    make_bodies(2)
    make_records(1)
    make_messages(1, "sent", sent=-96 * HOUR)
    both = make_bodies(1)
    IdempotencyRecord.objects.filter(pk__in=both).update(expires_at=from_now(-HOUR))  # is purged as a whole
    lines = ["2 records", "2 recorded responses", "1 sent message"]
    for options, verb in (({"dry_run": True}, "Would purge"), ({}, "Purged")):
        assert run_command("purge_idempotency", **options)[:2] == (
            0,
            [f"{verb} {line} from database 'default'." for line in lines],
        )
    assert len(gone()) == IdempotencyRecord.objects.count() == 2


@pytest.mark.parametrize(("bodies", "more"), [(5, True), (4, False)], ids=["more is due", "the last batch was full"])
def test_a_run_tells_whether_it_has_left_responses(bodies: int, more: bool) -> None:
    make_bodies(bodies)
    code, lines, _ = run_command("purge_idempotency", batch_size=2, max_batches=2)
    assert (code, "Stopped by --max-batches 2. More is due." in lines) == ((3, True) if more else (0, False))
    assert len(gone()) == 4
