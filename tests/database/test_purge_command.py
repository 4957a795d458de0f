"""``manage.py purge_idempotency``: its arguments, its report, its exit codes, and scenario 27."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, Event
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction

from idempotency.identity.fingerprint import Payload
from idempotency.identity.scope import Scope
from idempotency.lifecycle import Status
from idempotency.management import running
from idempotency.models import IdempotencyRecord
from idempotency.operation import Operation
from idempotency.outcome import Outcome
from idempotency.protocol import claims
from idempotency.protocol.ownership import Ownership
from idempotency.signals import purged
from tests.commands import run_command
from tests.records import HOUR, make_records, remaining

pytestmark = pytest.mark.django_db(transaction=True)

purged_under_load = Operation("tests.purged_under_load")


def purge(**options: Any) -> tuple[int, list[str]]:
    """Run the command: its exit code and the lines of its output."""
    code, lines, _ = run_command("purge_idempotency", **options)
    return code, lines


@contextmanager
def raising_signal(signum: int, *, in_batch: int) -> Iterator[None]:
    """Send this process a signal while it is in the middle of a batch."""
    statements = 0

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal statements
        if "DELETE FROM" in sql and "idempotency_step" not in sql.partition("WHERE")[0]:
            statements += 1
            if statements == in_batch:
                signal.raise_signal(signum)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        yield


def test_it_purges_all_that_is_due_and_says_so() -> None:
    make_records(1_234)
    kept = make_records(2, expires=HOUR) + make_records(2, Status.PARKED) + make_records(2, Status.IN_PROGRESS)
    assert purge() == (0, ["Purged 1,234 records from database 'default'."])
    assert remaining() == {*kept}
    assert purge() == (0, ["Purged 0 records from database 'default'."])


def test_parked_records_go_when_asked_for() -> None:
    make_records(1, Status.PARKED)
    assert purge(include_parked=True) == (0, ["Purged 1 record from database 'default'."])


def test_a_dry_run_counts_and_deletes_nothing() -> None:
    make_records(3)
    make_records(2, Status.RECOVERABLE)
    make_records(2, Status.PARKED)
    make_records(1, Status.IN_PROGRESS)
    make_records(7, expires=HOUR)
    before = remaining()
    assert purge(dry_run=True) == (
        0,
        [
            "Would purge 5 records from database 'default'.",
            "Would keep 1 record past retention: in progress.",
            "Would keep 2 records past retention: parked.",
        ],
    )
    assert purge(dry_run=True, include_parked=True) == (
        0,
        ["Would purge 7 records from database 'default'.", "Would keep 1 record past retention: in progress."],
    )
    assert remaining() == before


def test_a_dry_run_of_an_empty_table_says_that_nothing_is_due() -> None:
    assert purge(dry_run=True) == (0, ["Would purge 0 records from database 'default'."])


def test_a_run_stops_after_its_last_batch_and_tells_that_work_is_left() -> None:
    make_records(25)
    code, lines = purge(batch_size=10, max_batches=2)
    assert code == 3
    assert lines == ["Purged 20 records from database 'default'.", "Stopped by --max-batches 2. More is due."]
    assert len(remaining()) == 5
    assert purge(batch_size=10, max_batches=2)[0] == 0
    assert remaining() == set()


def test_what_falls_due_after_the_last_batch_is_left_to_the_next_run() -> None:
    def fall_due(**arguments: Any) -> None:
        make_records(1)

    make_records(1)
    purged.connect(fall_due)
    try:
        assert purge() == (0, ["Purged 1 record from database 'default'."])
    finally:
        purged.disconnect(fall_due)
    assert len(remaining()) == 1


def test_a_verbose_run_reports_each_batch() -> None:
    make_records(3)
    assert purge(batch_size=2, verbosity=2)[1] == [
        "Purged 2 records so far.",
        "Purged 3 records so far.",
        "Purged 3 records from database 'default'.",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "--batch-size must be between 1 and 10000"),
        ({"batch_size": -1}, "--batch-size must be between 1 and 10000"),
        ({"batch_size": 10_001}, "--batch-size must be between 1 and 10000"),
        ({"max_batches": 0}, "--max-batches must be 1 or more"),
        ({"max_batches": -1}, "--max-batches must be 1 or more"),
        ({"pause": -0.1}, "--pause must be between 0 and 3600 seconds"),
        ({"pause": float("nan")}, "--pause must be between 0 and 3600 seconds"),
        ({"pause": float("inf")}, "--pause must be between 0 and 3600 seconds"),
        ({"database": "nowhere"}, "--database: there is no database 'nowhere'"),
        ({"database": ""}, "--database: there is no database ''"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_wrong_argument_is_named_and_nothing_is_done(options: dict[str, Any], message: str) -> None:
    ids = make_records(1)
    with pytest.raises(CommandError, match=message) as refused:
        purge(**options)
    assert refused.value.returncode == 2
    assert remaining() == {*ids}


@pytest.mark.parametrize("arguments", [["--batch-size", "x"], ["--pause", "x"], ["--max-batches"], ["--no-such"]])
def test_arguments_that_cannot_be_read_are_refused(arguments: list[str]) -> None:
    with pytest.raises(CommandError, match=r"^Error: "):
        call_command("purge_idempotency", *arguments)


def test_a_database_that_refuses_is_an_error_with_its_own_code() -> None:
    """Failure mode 29."""
    ids = make_records(1)
    read_only, writable = {
        "postgresql": ("SET default_transaction_read_only = on", "SET default_transaction_read_only = off"),
        "sqlite": ("PRAGMA query_only = on", "PRAGMA query_only = off"),
        "mysql": ("SET SESSION TRANSACTION READ ONLY", "SET SESSION TRANSACTION READ WRITE"),
    }[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(read_only)
        try:
            with pytest.raises(CommandError, match=r"Database 'default' refused: .*(?i:read)") as refused:
                purge()
        finally:
            cursor.execute(writable)
    assert refused.value.returncode == 1
    assert remaining() == {*ids}


def test_a_pause_lies_between_batches_only(monkeypatch: pytest.MonkeyPatch) -> None:
    make_records(25)
    slept: list[float] = []
    clock = 0.0

    def sleep(seconds: float) -> None:
        nonlocal clock
        clock += seconds
        slept.append(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    assert purge(batch_size=10, pause=1.0)[0] == 0
    assert sum(slept) == pytest.approx(2.0)
    assert max(slept) <= running.SLICE


def test_a_signal_ends_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    make_records(25)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(CommandError, match="Stopped by SIGTERM"):
        purge(batch_size=10, pause=60.0)
    assert slept == [running.SLICE]
    assert len(remaining()) == 15


def scope(key: str) -> Scope:
    return Scope("1", purged_under_load.name, key)


@pytest.mark.scenario(27)
def test_purge_under_load() -> None:
    """Bounded batches, no live claim touched, and no claim waits for the purge long enough to be turned away.

    Claimants claim new keys, and keys that are being purged at that moment, and complete every other claim. A claim
    that met a lock for longer than the claims' own limit would raise.
    """
    payload = Payload({"amount": 1})
    rounds = 40
    claimants = 4
    keys = [[f"{number}-{i}" for i in range(rounds)] for number in range(claimants)]
    # The retention of half of the keys is over, all the same to their claimants.
    reused = {key for of_one in keys for key in of_one[::2]}
    for key in sorted(reused):
        make_records(1, operation=purged_under_load.name, idempotency_key=key, request_hash=payload.request_hash)
    make_records(600)
    live = make_records(5, Status.IN_PROGRESS, lease=HOUR, expires=-HOUR)
    abandoned = make_records(5, Status.IN_PROGRESS, lease=-HOUR, expires=-HOUR)
    together = Barrier(claimants + 2)
    load_is_over = Event()

    def claim_all(of_one: list[str]) -> tuple[list[int], list[int]]:
        together.wait(timeout=60)
        completed, open_claims = [], []
        try:
            for number, key in enumerate(of_one):
                claim = claims.acquire(purged_under_load, scope(key), payload)
                assert isinstance(claim, Ownership), f"{key} was answered from a record past retention"
                if number % 4 < 2:
                    with transaction.atomic(durable=True):
                        claims.complete(claim, Outcome(201, (), "{}", None))
                    completed.append(claim.record_id)
                else:
                    open_claims.append(claim.record_id)
        finally:
            connections.close_all()
        return completed, open_claims

    def purge_again_and_again() -> list[int]:
        together.wait(timeout=60)
        codes = []
        try:
            while not load_is_over.is_set():
                codes.append(purge(batch_size=10, max_batches=5)[0])
            codes.append(purge(batch_size=10)[0])
        finally:
            connections.close_all()
        return codes

    with ThreadPoolExecutor(claimants + 2) as pool:
        purges = [pool.submit(purge_again_and_again) for _ in range(2)]
        load = [pool.submit(claim_all, of_one) for of_one in keys]
        try:
            results = [claimant.result() for claimant in load]
        finally:
            load_is_over.set()
        assert {code for one in purges for code in one.result()} <= {0, 3}

    completed = {pk for of_one, _ in results for pk in of_one}
    open_claims = {pk for _, of_one in results for pk in of_one}
    assert len(completed) == len(open_claims) == claimants * rounds / 2
    assert remaining() == {*live, *abandoned} | completed | open_claims
    records = IdempotencyRecord.objects.filter(operation=purged_under_load.name)
    assert set(records.completed().values_list("pk", flat=True)) == completed
    assert set(records.in_progress().values_list("pk", flat=True)) == open_claims
    assert sorted(records.values_list("idempotency_key", flat=True)) == sorted(key for of_one in keys for key in of_one)
