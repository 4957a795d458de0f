"""The store's connection breaks, or the store can't be reached, read or written, or has changed since it was read."""

import logging
from contextlib import closing, contextmanager
from unittest.mock import Mock

import pytest
from django.db import OperationalError, ProgrammingError, connection

from idempotency import signals
from idempotency.models import IdempotencyRecord
from idempotency.protocol import ownership
from idempotency.protocol.acquisition import MAX_ROUNDS
from idempotency.protocol.faults import fault_point
from idempotency.store import store_for
from tests.concurrency.failures import (
    BROKEN,
    UNAVAILABLE,
    UNKNOWN,
    cut_connection,
    error_of,
    fail,
    failing_database,
    problem,
)
from tests.concurrency.traces import effects, end_lease, record, state
from tests.concurrency.urls import handler
from tests.database.statements import execute
from tests.operations import receiving


@pytest.mark.failure_13
@pytest.mark.postgres
def test_a_connection_lost_before_a_watched_statement_is_a_django_error(post):
    caught = []

    def die(request):
        cut_connection()
        try:
            execute("SELECT 'COMMIT'")
        except OperationalError as error:
            caught.append(error)
            raise

    handler.after = die
    assert post().status_code == 500
    assert (len(caught), effects()) == (1, [])


@pytest.mark.failure_13
@pytest.mark.postgres
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_connection_that_dies_in_the_handler_leaves_nothing(post, moment):
    def die(request):
        if handler.attempts == [1]:
            cut_connection()

    setattr(handler, moment, die)
    answer = post()

    assert answer.status_code == {"before": 500, "after": 503}[moment]
    assert effects() == []
    assert post().status_code == 201
    assert (effects(), handler.attempts) == (["one"], [1, 2])


def test_a_claim_that_can_not_be_released_is_left_to_its_lease(post, caplog):
    handler.before = fail
    with failing_database(ownership, "release"):
        assert post().status_code == 500
    assert record().status == "in_progress"
    assert "its lease runs out by itself" in caplog.text
    end_lease()
    handler.before = lambda request: None
    assert post().json()["attempt"] == 2
    assert effects() == ["one"]


@contextmanager
def read_only():
    statement = {
        "postgresql": "SET default_transaction_read_only = on",
        "sqlite": "PRAGMA query_only = ON",
        "mysql": "SET SESSION TRANSACTION READ ONLY",
    }
    execute(statement[connection.vendor])
    with closing(connection):
        yield


@contextmanager
def out_of_reach():
    connection.close()
    with pytest.MonkeyPatch.context() as patched, closing(connection):
        patched.setitem(connection.settings_dict, "HOST" if connection.vendor == "postgresql" else "NAME", "/no/where")
        yield


@contextmanager
def locked_file():
    execute("PRAGMA busy_timeout = 50")
    other = connection.copy("other")
    other.set_autocommit(False)
    with closing(connection), closing(other), other.cursor() as cursor:
        cursor.execute("BEGIN IMMEDIATE")
        yield
        cursor.execute("ROLLBACK")


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(read_only, marks=pytest.mark.failure_29),
        pytest.param(out_of_reach, marks=pytest.mark.failure_29),
        pytest.param(locked_file, marks=[pytest.mark.failure_21, pytest.mark.sqlite]),
    ],
)
def test_a_store_that_can_not_be_written_gives_503_and_no_effect(post, trouble):
    with trouble():
        answer = post()
    assert (problem(answer), answer["Retry-After"]) == (UNAVAILABLE, "1")
    assert (handler.attempts, effects(), list(IdempotencyRecord.objects.all())) == ([], [], [])
    assert post().status_code == 201
    assert effects() == ["one"]


RENAME = "ALTER TABLE idempotency_record{} RENAME TO idempotency_record{}"
ALTER = "ALTER TABLE idempotency_record "


@pytest.mark.parametrize(
    ("change", "undo"),
    [
        pytest.param(RENAME.format("", "_elsewhere"), RENAME.format("_elsewhere", ""), id="missing_table"),
        # Only the migrations of a deploy have run.
        pytest.param(
            *(f"{ALTER} ADD COLUMN later integer NOT NULL", f"{ALTER} DROP COLUMN later"),
            marks=pytest.mark.postgres,
            id="unknown_column",
        ),
        pytest.param("SET ROLE pg_monitor", "RESET ROLE", marks=pytest.mark.postgres, id="missing_permission"),
    ],
)
def test_a_mismatched_schema_is_a_503_without_a_retry_and_logged_once(post, change, undo, caplog):
    caplog.set_level(logging.CRITICAL, "idempotency")
    execute(change)
    try:
        for _ in range(2):
            answer = post()
            assert problem(answer) == UNAVAILABLE
            assert "Retry-After" not in answer.headers  # a retry would fail the same way
    finally:
        execute(undo)
    assert handler.attempts == []
    [reported] = caplog.messages  # once, not for each request
    assert "don't fit this release, or its role lacks a permission" in reported
    assert post().status_code == 201


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("path", "sql", "left"),
    [("/inside/", "SET LOCAL", "recoverable"), ("/park/", "SET", "in_progress")],
    ids=["in a transaction", "outside"],
)
@pytest.mark.parametrize("setting", ["role = pg_monitor", "search_path = pg_catalog"])
def test_a_handler_that_hides_its_record_is_reported(post, path, sql, left, setting, caplog):
    caplog.set_level(logging.CRITICAL, "idempotency")
    handler.after = lambda request: execute(f"{sql} {setting}")
    for key in ("one", "two"):
        answer = post(path, key=key)
        connection.close()  # the session's setting hides the records from this test, too
        assert problem(answer) == UNAVAILABLE
        assert "Retry-After" not in answer.headers
        assert [record.status for record in IdempotencyRecord.objects.all()] == [left]
        IdempotencyRecord.objects.all().delete()
    assert ["changed the role or the search_path" in line for line in caplog.messages] == [True]


def test_each_kind_of_permanent_error_is_logged_once(monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL, "idempotency")
    monkeypatch.setattr(type(store_for("default")), "is_permanent", lambda store, error: True)
    for text in ("no table", "no type", "no index", "no column\nLINE 1\n^", "no column\nLINE 2\n^"):
        ownership.unavailable("default", ProgrammingError(text))
    ownership.unavailable("default", OperationalError("no table"))
    assert len(caplog.messages) == 5


@pytest.fixture(autouse=True)
def _nothing_is_reported_yet():
    ownership._reported.clear()


@pytest.mark.failure_17
@pytest.mark.parametrize(("times", "status"), [(1, 201), (MAX_ROUNDS - 1, 201), (MAX_ROUNDS, 409)])
def test_a_deadlocked_claim_is_retried_as_a_whole_up_to_a_limit(post, monkeypatch, times, status):
    rounds = []
    error = error_of(monkeypatch, "40P01", "lost_a_race")

    def deadlock():
        rounds.append(1)
        if len(rounds) <= times:
            raise error

    monkeypatch.setitem(fault_point, "claim.before", deadlock)
    answer = post()
    assert (answer.status_code, answer.get("Retry-After")) == (status, None if status == 201 else "1")
    assert len(rounds) == min(times + 1, MAX_ROUNDS)
    assert effects() == (["one"] if status == 201 else [])


@pytest.mark.failure_21
@pytest.mark.parametrize(
    ("sqlstate", "meaning", "reported", "retry_after"),
    [
        ("55P03", "timed_out_waiting", UNAVAILABLE, "1"),
        ("42P01", "is_permanent", UNAVAILABLE, None),
        ("25P02", "was_broken_before", BROKEN, None),
        ("25006", "was_read_only", BROKEN, None),
    ],
)
def test_a_failing_completion_rolls_back_and_releases_with_the_reason(
    post, monkeypatch, sqlstate, meaning, reported, retry_after
):
    error = error_of(monkeypatch, sqlstate, meaning)
    with monkeypatch.context() as patched:
        patched.setattr(store_for("default"), "complete", Mock(side_effect=error))
        answer = post()
    assert (problem(answer), answer.get("Retry-After")) == (reported, retry_after)
    assert state() == ("recoverable", [])
    reasons = {UNAVAILABLE: "UnavailableError", BROKEN: "TransactionBrokenError"}
    assert record().error.startswith(reasons[reported])
    assert post().status_code == 201
    assert effects() == ["one"]


def test_a_claim_parked_concurrently_is_reported_but_not_announced_again(post, cut_off, monkeypatch):
    cut_off("/park/")
    store = store_for("default")
    park_abandoned = store.park_abandoned
    monkeypatch.setattr(store, "park_abandoned", lambda *args: park_abandoned(*args) and park_abandoned(*args))
    with receiving(signals.parked) as parked:
        assert problem(post("/park/")) == UNKNOWN
    assert (record().status, parked) == ("parked", [])


@pytest.mark.parametrize(
    ("sqlstate", "meanings", "retry_after"), [("08006", [], "1"), ("42P01", ["is_permanent"], None)]
)
def test_a_lost_lease_whose_winner_can_not_be_read_is_503(post, monkeypatch, sqlstate, meanings, retry_after):
    error = error_of(monkeypatch, sqlstate, *meanings)

    def lose(request):
        IdempotencyRecord.objects.update(attempt=2)
        monkeypatch.setattr(store_for("default"), "read", Mock(side_effect=error))

    handler.before = lose
    answer = post()
    assert (problem(answer), answer.get("Retry-After")) == (UNAVAILABLE, retry_after)
    assert effects() == []


def test_a_record_purged_between_the_lost_insert_and_the_read_is_reclaimed(post):
    def purge(execute, sql, *rest):
        if sql.lstrip().startswith("SELECT"):
            IdempotencyRecord.objects.all().delete()
        return execute(sql, *rest)

    post()
    with connection.execute_wrapper(purge):
        assert post().status_code == 201
    assert handler.attempts == [1, 1]
