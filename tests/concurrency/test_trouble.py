"""The database or the handler fails at the worst moment."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from django.db import DataError, IntegrityError, OperationalError, connection, connections, transaction
from django.http import HttpResponse

from idempotency import Completed, claims, execution, signals
from idempotency.models import IdempotencyRecord
from tests.concurrency.racing import abandon, effects, end_lease, record
from tests.concurrency.urls import handler, reconciler

pytestmark = pytest.mark.urls("tests.concurrency.urls")

Post = Callable[..., Any]


def _fail(request: Any = None) -> None:
    raise RuntimeError("on purpose")


def code_of(answer: Any) -> str:
    assert answer["Content-Type"] == "application/problem+json"
    return str(answer.json()["code"])


# COMMIT


@contextmanager
def business_commit(replacement: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Let ``replacement(commit)`` stand in for the COMMIT of the next transaction in which an effect is written."""
    database = connections["default"]
    commit = database._commit

    def _commit() -> None:
        if handler.attempts:
            database._commit = commit
            replacement(commit)
        else:
            commit()

    database._commit = _commit
    try:
        yield
    finally:
        database._commit = commit


def test_failure_mode_12_a_commit_whose_answer_is_lost_is_not_taken_for_a_failure(post: Post) -> None:
    def lose_the_answer(commit: Callable[[], None]) -> None:
        commit()
        raise OperationalError("server closed the connection unexpectedly")

    with business_commit(lose_the_answer):
        answer = post()

    assert (answer.status_code, code_of(answer), answer["Retry-After"]) == (503, "idempotency_unavailable", "1")
    retry = post()
    assert (retry.status_code, retry["Idempotency-Replayed"]) == (201, "true")
    assert (effects(), handler.attempts) == (["one"], [1])


def test_failure_mode_12_a_commit_that_never_arrived_releases_nothing_and_runs_after_the_lease(post: Post) -> None:
    def never_arrive(commit: Callable[[], None]) -> None:
        raise OperationalError("server closed the connection unexpectedly")

    with business_commit(never_arrive):
        assert post().status_code == 503

    assert (effects(), record().status) == ([], "in_progress")
    assert post().status_code == 409
    end_lease()
    assert post().json()["attempt"] == 2
    assert (effects(), handler.attempts) == (["one"], [1, 2])


@pytest.mark.postgres
@pytest.mark.parametrize("sqlstate", ["40001", "40P01"])
def test_a_commit_that_the_server_refused_is_released_at_once(post: Post, sqlstate: str) -> None:
    from psycopg import errors

    def refuse(commit: Callable[[], None]) -> None:
        connections["default"]._rollback()
        raise OperationalError("refused") from errors.lookup(sqlstate)("refused")

    with business_commit(refuse):
        assert post().status_code == 500

    assert (effects(), record().status) == ([], "recoverable")
    assert post().status_code == 201
    assert effects() == ["one"]


def test_a_deferred_constraint_that_fails_in_commit_is_the_handlers_failure(post: Post, account: str) -> None:
    """Foreign keys are only checked by COMMIT, on both databases."""
    nobody = int(account) + 1000
    answer = post(account=str(nobody))
    assert answer.status_code == 500  # as unprotected, with the handler's own IntegrityError
    assert (effects(), record().status) == ([], "recoverable")
    assert post(account=str(nobody)).status_code == 500
    assert handler.attempts == [1, 2]


def test_failure_mode_26_a_failing_on_commit_callback_leaves_the_outcome_recorded(post: Post) -> None:
    handler.after = lambda request: transaction.on_commit(_fail)
    assert post().status_code == 500
    assert record().status == "completed"
    retry = post()
    assert (retry.status_code, retry["Idempotency-Replayed"]) == (201, "true")
    assert (effects(), handler.attempts) == (["one"], [1])


def test_failure_mode_26_an_integrity_error_in_on_commit_frees_nothing(post: Post) -> None:
    def violate() -> None:
        raise IntegrityError("of the callback's own making")

    handler.after = lambda request: transaction.on_commit(violate)
    post()
    assert record().status == "completed"
    assert post().status_code == 201
    assert (effects(), handler.attempts) == (["one"], [1])


# A connection that breaks


@pytest.mark.postgres
@pytest.mark.parametrize("moment", ["before", "after"])
def test_failure_mode_13_a_connection_that_dies_in_the_handler_leaves_nothing(post: Post, moment: str) -> None:
    def die(request: Any) -> None:
        if handler.attempts == [1]:
            _end_this_session()

    setattr(handler, moment, die)
    answer = post()

    assert answer.status_code == {"before": 500, "after": 503}[moment]
    assert effects() == []
    assert post().status_code == 201
    assert (effects(), handler.attempts) == (["one"], [1, 2])


def _end_this_session() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        pid = cursor.fetchone()[0]
    other = connection.copy("other")
    with other.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
    other.close()


def test_a_claim_that_can_not_be_released_is_left_to_its_lease(
    post: Post, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreachable(claim: Any) -> bool:
        raise OperationalError("no route")

    monkeypatch.setattr(claims, "release", unreachable)
    handler.before = _fail
    assert post().status_code == 500
    assert record().status == "in_progress"
    assert "its lease runs out by itself" in caplog.text
    monkeypatch.undo()
    end_lease()
    handler.before = lambda request: None
    assert post().json()["attempt"] == 2
    assert effects() == ["one"]


# A store that can't be written


def test_failure_mode_29_a_read_only_store_is_503_and_nothing_runs(post: Post) -> None:
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SET default_transaction_read_only = on")
        else:
            cursor.execute("PRAGMA query_only = ON")
    try:
        answer = post()
    finally:
        connection.close()
    assert (answer.status_code, code_of(answer), answer["Retry-After"]) == (503, "idempotency_unavailable", "1")
    assert handler.attempts == []
    assert post().status_code == 201


def test_failure_mode_29_an_unreachable_store_is_503_and_nothing_runs(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = "/nowhere/at/all"
    monkeypatch.setitem(connection.settings_dict, "HOST" if connection.vendor == "postgresql" else "NAME", nowhere)
    connection.close()
    answer = post()
    connection.close()
    monkeypatch.undo()
    assert (answer.status_code, code_of(answer)) == (503, "idempotency_unavailable")
    assert handler.attempts == []
    assert post().status_code == 201


def test_a_store_without_its_table_is_503_and_nothing_runs(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    from idempotency.sql import postgresql

    monkeypatch.setattr(IdempotencyRecord._meta, "db_table", "no_such_table")
    monkeypatch.setattr(
        postgresql, "INSERT_FAST_CLAIM", postgresql.INSERT_FAST_CLAIM.replace("idempotency_record", "no_such_table")
    )
    assert post().status_code == 503
    assert handler.attempts == []


@pytest.mark.sqlite
def test_failure_mode_21_a_busy_sqlite_is_503_before_any_effect(post: Post) -> None:
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA busy_timeout = 50")
    other = connection.copy("other")
    other.set_autocommit(False)
    with other.cursor() as cursor:
        cursor.execute("BEGIN IMMEDIATE")
        answer = post()
        cursor.execute("ROLLBACK")
    other.close()
    connection.close()
    assert (answer.status_code, code_of(answer)) == (503, "idempotency_unavailable")
    assert handler.attempts == []
    assert post().status_code == 201


def test_failure_mode_21_a_store_that_is_busy_when_the_business_transaction_begins_is_503_and_nothing_runs(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*args: Any, **kwargs: Any) -> None:
        raise OperationalError("database is locked")

    monkeypatch.setattr(claims.sql.backend("default"), "bound_transaction", busy)
    answer = post("/bounded/")
    assert (answer.status_code, code_of(answer)) == (503, "idempotency_unavailable")
    assert (handler.attempts, record().status) == ([], "recoverable")
    monkeypatch.undo()
    assert post("/bounded/").status_code == 201


def test_an_outcome_that_can_not_be_written_is_503_and_nothing_is_kept(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(claim: Any, outcome: Any) -> None:
        raise OperationalError("could not extend file: No space left on device")

    monkeypatch.setattr(claims, "complete", disk_full)
    answer = post()
    assert (answer.status_code, code_of(answer)) == (503, "idempotency_unavailable")
    assert effects() == []
    monkeypatch.undo()
    assert post().status_code == 201
    assert (effects(), handler.attempts) == (["one"], [1, 2])


def test_a_record_that_never_settles_is_in_progress_after_a_bounded_number_of_rounds(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []
    monkeypatch.setattr(claims, "_one_round", lambda *args: rounds.append(1))
    assert post().status_code == 409
    assert len(rounds) == claims.MAX_ROUNDS
    assert handler.attempts == []


@pytest.mark.postgres
def test_failure_mode_17_a_claim_that_lost_to_a_deadlock_is_tried_again_as_a_whole(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    from psycopg import errors

    one_round = claims._one_round
    rounds: list[int] = []

    def deadlock_first(*args: Any) -> Any:
        rounds.append(1)
        if len(rounds) == 1:
            raise OperationalError("deadlock detected") from errors.DeadlockDetected()
        return one_round(*args)

    monkeypatch.setattr(claims, "_one_round", deadlock_first)
    assert post().status_code == 201
    assert (len(rounds), effects()) == (2, ["one"])


def test_a_claim_parked_by_somebody_else_since_it_was_read_is_reported_and_not_announced_again(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    post("/park/")
    abandon()
    end_lease()
    backend = claims.sql.backend("default")
    park_abandoned = backend.park_abandoned
    parked: list[str] = []

    def parked_meanwhile(*args: Any) -> bool:
        park_abandoned(*args)
        return park_abandoned(*args)

    def note(**arguments: Any) -> None:
        parked.append(arguments["idempotency_key"])

    signals.parked.connect(note)
    monkeypatch.setattr(backend, "park_abandoned", parked_meanwhile)
    assert code_of(post("/park/")) == "idempotency_outcome_unknown"
    signals.parked.disconnect(note)
    assert (record().status, parked) == ("failed", [])


def test_a_lost_lease_whose_winner_can_not_be_read_is_503(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = claims.sql.backend("default")

    def lose(request: Any) -> None:
        IdempotencyRecord.objects.update(attempt=2)
        monkeypatch.setattr(backend, "read", unreachable)

    def unreachable(*args: Any) -> Any:
        raise OperationalError("no route")

    handler.before = lose
    answer = post()
    assert (answer.status_code, code_of(answer)) == (503, "idempotency_unavailable")
    assert effects() == []


def test_a_record_purged_between_the_lost_insert_and_the_read_is_claimed_anew(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    post()
    backend = claims.sql.backend("default")
    read = backend.read

    def purged_meanwhile(using: str, scope: Any) -> Any:
        IdempotencyRecord.objects.all().delete()
        return read(using, scope)

    monkeypatch.setattr(backend, "read", purged_meanwhile)
    assert post().status_code == 201
    assert handler.attempts == [1, 1]


# A handler that goes on after an error


def test_failure_mode_24_a_swallowed_database_error_is_never_answered_with_success(post: Post) -> None:
    def swallow(request: Any) -> None:
        if len(handler.attempts) > 1:
            return
        try:
            with transaction.atomic(savepoint=False):
                raise IntegrityError("a duplicate that the handler thinks nothing of")
        except IntegrityError:
            pass

    handler.after = swallow
    answer = post()
    assert (answer.status_code, code_of(answer)) == (500, "idempotency_transaction_broken")
    assert "race.inside" in answer.json()["detail"]
    assert effects() == []
    assert post().status_code == 201
    assert effects() == ["one"]


@pytest.mark.postgres
def test_failure_mode_24_a_statement_that_broke_the_transaction_unseen_is_noticed(post: Post) -> None:
    def swallow(request: Any) -> None:
        with suppress(DataError), connection.cursor() as cursor:  # this is the careless handler
            cursor.execute("SELECT 1 / 0")

    handler.after = swallow
    answer = post()
    assert (answer.status_code, code_of(answer)) == (500, "idempotency_transaction_broken")
    assert (effects(), record().status) == ([], "recoverable")


def test_a_rollback_that_the_handler_asked_for_is_kept_with_its_refusal(post: Post) -> None:
    def refuse(request: Any) -> HttpResponse:
        transaction.set_rollback(True)
        return HttpResponse("no", status=409)

    handler.after = refuse
    assert post().status_code == 409
    assert effects() == []
    retry = post()
    assert (retry.status_code, retry.content, retry["Idempotency-Replayed"]) == (409, b"no", "true")
    assert handler.attempts == [1]


def test_a_worker_that_is_told_to_exit_releases_nothing(post: Post) -> None:
    def leave(request: Any) -> None:
        raise SystemExit(1)

    handler.before = leave
    with pytest.raises(SystemExit):
        post()
    assert (record().status, effects()) == ("in_progress", [])
    assert execution.current_claim() is None


# Without a transaction


def test_outside_of_a_transaction_the_outcome_is_recorded_and_replayed(post: Post) -> None:
    for path in ("/park/", "/again/"):
        first = post(path, key=path)
        assert post(path, key=path).content == first.content
    assert effects() == ["one", "one"]


def test_park_never_runs_again_by_itself(post: Post) -> None:
    handler.after = _fail
    assert post("/park/").status_code == 500
    assert (record().status, effects()) == ("failed", ["one"])
    handler.after = lambda request: None
    for _ in range(2):
        answer = post("/park/")
        assert (answer.status_code, code_of(answer)) == (409, "idempotency_outcome_unknown")
        assert "Retry-After" not in answer.headers
    assert post("/park/", label="other").status_code == 422
    assert effects() == ["one"]


def test_an_abandoned_claim_of_a_park_operation_is_parked_and_not_run(post: Post) -> None:
    post("/park/")
    abandon()
    end_lease()
    assert code_of(post("/park/")) == "idempotency_outcome_unknown"
    assert (record().status, effects(), handler.attempts) == ("failed", [], [1])


def test_an_operation_with_a_reconciler_that_failed_keeps_its_claim_until_somebody_can_ask(post: Post) -> None:
    """Its call may have arrived, or be on its way still: neither a retry nor a parked record is right."""
    handler.after = _fail
    assert post("/reconciled/").status_code == 500
    handler.after = lambda request: HttpResponse(status=502)
    assert record().status == "in_progress"
    assert post("/reconciled/").status_code == 409
    end_lease()
    reconciler.find_out = lambda row: Completed({"found": row.attempt})
    answer = post("/reconciled/")
    assert (answer.status_code, answer.json(), handler.attempts) == (200, {"found": 2}, [1])


def test_reexecute_outside_of_a_transaction_runs_again(post: Post) -> None:
    handler.before = lambda request: _fail() if handler.attempts == [1] else None
    assert post("/again/").status_code == 500
    assert record().status == "recoverable"
    assert post("/again/").status_code == 201
    assert effects() == ["one"]


def test_an_unrecordable_answer_outside_of_a_transaction_is_given_up_as_declared(post: Post) -> None:
    handler.after = lambda request: HttpResponse(status=503)
    assert post("/again/", key="a").status_code == 503
    assert record("a").status == "recoverable"
    assert post("/park/", key="p").status_code == 503
    assert record("p").status == "failed"


def test_outside_of_a_transaction_a_lost_lease_is_answered_from_the_winner(post: Post) -> None:
    def taken_over(request: Any) -> None:
        if handler.attempts == [1]:
            end_lease()
            winner.append(post("/again/"))

    winner: list[Any] = []
    handler.before = taken_over
    late = post("/again/")
    assert late.content == winner[0].content
    assert late["Idempotency-Replayed"] == "true"


def test_outside_of_a_transaction_a_lost_recording_leaves_the_claim_to_recovery(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(claim: Any, outcome: Any) -> None:
        raise OperationalError("no route")

    monkeypatch.setattr(claims, "complete", unreachable)
    answer = post("/park/")
    assert (answer.status_code, code_of(answer)) == (503, "idempotency_unavailable")
    assert (record().status, effects()) == ("in_progress", ["one"])


# A record that can't be read back


def test_failure_mode_51_a_damaged_record_is_500_and_never_run_again(
    post: Post, caplog: pytest.LogCaptureFixture
) -> None:
    post()
    for damage in (
        {"response_headers": [["Location"]]},
        {"response_headers": [], "response_status": None},
        {"response_status": 201, "response_body": json.dumps({"$idempotency-envelope": 7}).replace(": ", ":", 1)},
    ):
        IdempotencyRecord.objects.update(**damage)
        answer = post()
        assert (answer.status_code, code_of(answer)) == (500, "idempotency_outcome_unreadable")
    assert (effects(), handler.attempts) == (["one"], [1])
    assert "race.inside" in caplog.text


def test_an_open_transaction_is_an_error_that_names_the_remedy(post: Post) -> None:
    with transaction.atomic():
        answer = post()
    assert answer.status_code == 500
    assert code_of(answer) == "idempotency_outer_transaction"
    assert "non_atomic_requests" in answer.json()["detail"]
    assert (effects(), handler.attempts) == ([], [])
