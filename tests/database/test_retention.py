"""The purge deletes what is past retention, in bounded batches, and never a claim; and ``purge_idempotency``."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.core.management import CommandError
from django.db import connection, transaction
from django.utils import timezone

from idempotency.lifecycle import Status
from idempotency.management import running
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.operate.purge import PurgeResult, due, purge_batches, purge_once
from idempotency.operation import Operation
from idempotency.outbox.models import MessageStatus, OutboxMessage
from idempotency.protocol import claims
from idempotency.protocol.ownership import Ownership
from idempotency.signals import purged
from tests.commands import run_command
from tests.concurrency.racing import PATIENCE, race
from tests.database import processes
from tests.database.claiming import OUTCOME, PAYLOAD, acquire
from tests.database.statements import before_statement
from tests.outbox import make_messages, statuses
from tests.records import HOUR, make_records, remaining

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("lease", [HOUR, -HOUR, None], ids=["live", "abandoned", "without lease"])
@pytest.mark.parametrize("include_parked", [False, True])
def test_a_claim_is_never_purged(lease: timedelta | None, include_parked: bool) -> None:
    kept = make_records(3, Status.IN_PROGRESS, lease=lease)
    assert purge_once(include_parked=include_parked) == PurgeResult()
    assert remaining() == {*kept}


def test_a_batch_takes_no_more_than_its_size_oldest_first() -> None:
    newest = make_records(5)
    oldest = make_records(5, expires=-2 * HOUR)
    batch = purge_once(batch_size=4)
    assert (batch.deleted, batch.exhausted) == (4, False)
    assert remaining() == {*newest, oldest[-1]}


def test_records_that_expire_at_one_instant_are_all_purged() -> None:
    ids = make_records(25)
    instant = IdempotencyRecord.objects.values_list("expires_at", flat=True).get(pk=ids[0])
    IdempotencyRecord.objects.update(expires_at=instant)
    assert sum(batch.deleted for batch in purge_batches(batch_size=10)) == 25
    assert remaining() == set()


@pytest.mark.failure_5
def test_the_application_clock_plays_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = make_records(1, expires=HOUR)
    make_records(1)
    ahead = timezone.now() + timedelta(days=365)
    monkeypatch.setattr(timezone, "now", lambda: ahead)
    assert purge_once().deleted == 1
    assert remaining() == {*kept}


@pytest.mark.failure_9
@pytest.mark.failure_30
def test_two_purges_at_once_share_the_work() -> None:
    make_records(300)
    kept = make_records(20, expires=HOUR) + make_records(20, Status.IN_PROGRESS, lease=-HOUR)
    shares = race([lambda: sum(batch.deleted for batch in purge_batches(batch_size=7))] * 4)
    assert sum(shares) == 300
    assert remaining() == {*kept}


@pytest.mark.failure_30
def test_a_record_that_is_claimed_anew_between_finding_and_deleting_stays() -> None:
    revived, *_ = make_records(3)

    def claim_anew() -> None:
        IdempotencyRecord.objects.filter(pk=revived).update(status=Status.IN_PROGRESS)

    with before_statement("DELETE", claim_anew):
        batch = purge_once()
    assert (batch.deleted, batch.exhausted) == (2, True)
    assert remaining() == {revived}


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


purged_under_load = Operation("tests.purged_under_load")

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


# Ended in the middle, and run again

STOPPED = """
import os, signal, sys
import django
django.setup()
from django.core.management import call_command
from idempotency.protocol.faults import fault_point
reached = []
def selected():
    reached.append(1)
    if len(reached) == 3:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
fault_point["purge.selected"] = selected
call_command("purge_idempotency", batch_size=5)
"""


@pytest.mark.scenario_27
@pytest.mark.parametrize(
    ("name", "code", "deleted"),
    [("SIGKILL", -signal.SIGKILL, 10), ("SIGTERM", 143, 15), ("SIGINT", 130, 15)],
    ids=["killed", "terminated", "interrupted"],
)
def test_a_purge_that_is_ended_in_a_batch_is_simply_run_again(name: str, code: int, deleted: int) -> None:
    """A killed one has lost its batch as a whole. One that may end by itself commits it first."""
    ids = make_records(30)
    for pk in ids:
        IdempotencyStep.objects.create(account_id="1", record_id=pk, name="charge", result="1")
    ended = processes.start(STOPPED, name)
    _, errors = ended.communicate(timeout=PATIENCE)
    # A management command that is called from a script raises; the exit code is its error's.
    assert ended.returncode == (code if code < 0 else 1), errors
    assert code < 0 or f"Stopped by {name}" in errors
    with transaction.atomic():
        list(IdempotencyRecord.objects.select_for_update())  # waits for the end of the killed process's session
    left = {*ids[deleted:]}
    assert remaining() == left == {*IdempotencyStep.objects.values_list("record_id", flat=True)}
    assert purge(batch_size=5) == (0, [f"Purged {len(left)} records from database 'default'."])
    assert not IdempotencyStep.objects.exists()


@pytest.mark.scenario_27
def test_purge_under_load() -> None:
    """Bounded batches, no live claim touched, and no claim waits for the purge long enough to be turned away.

    Claimants claim new keys, and keys that are being purged at that moment, and complete every other claim. A claim
    that met a lock for longer than the claims' own limit would raise.
    """
    rounds, claimants = 40, 4
    keys = [[f"{number}-{i}" for i in range(rounds)] for number in range(claimants)]
    # The retention of half of the keys is over, all the same to their claimants.
    for key in sorted(key for of_one in keys for key in of_one[::2]):
        make_records(1, operation=purged_under_load.name, idempotency_key=key, request_hash=PAYLOAD.request_hash)
    make_records(600)
    live = make_records(5, Status.IN_PROGRESS, lease=HOUR, expires=-HOUR)
    abandoned = make_records(5, Status.IN_PROGRESS, lease=-HOUR, expires=-HOUR)
    completed: set[int] = set()
    open_claims: set[int] = set()
    ended: list[str] = []
    codes: set[int] = set()

    def claim_all(of_one: list[str]) -> None:
        try:
            for number, key in enumerate(of_one):
                claim = acquire(purged_under_load, key)
                assert isinstance(claim, Ownership), f"{key} was answered from a record past retention"
                if number % 4 < 2:
                    with transaction.atomic(durable=True):
                        claims.complete(claim, OUTCOME)
                    completed.add(claim.fence.id)
                else:
                    open_claims.add(claim.fence.id)
        finally:
            ended.append(of_one[0])

    def purge_again_and_again() -> None:
        while len(ended) < claimants:
            codes.add(purge(batch_size=10, max_batches=5)[0])
        codes.add(purge(batch_size=10)[0])

    race([*(partial(claim_all, of_one) for of_one in keys), *[purge_again_and_again] * 2])
    assert codes <= {0, 3}
    assert len(completed) == len(open_claims) == claimants * rounds / 2
    assert remaining() == {*live, *abandoned} | completed | open_claims
    records = IdempotencyRecord.objects.filter(operation=purged_under_load.name)
    assert set(records.completed().values_list("pk", flat=True)) == completed
    assert set(records.in_progress().values_list("pk", flat=True)) == open_claims
    assert sorted(records.values_list("idempotency_key", flat=True)) == sorted(key for of_one in keys for key in of_one)
