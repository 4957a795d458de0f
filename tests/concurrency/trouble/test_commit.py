"""A COMMIT whose answer is lost, that never arrives, that is refused, or whose callbacks fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from django.db import IntegrityError, OperationalError, connections, transaction

from tests.concurrency.conftest import Post
from tests.concurrency.racing import effects, end_lease, record
from tests.concurrency.trouble.failures import code_of, fail
from tests.concurrency.urls import handler

pytestmark = pytest.mark.urls("tests.concurrency.urls")


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


@pytest.mark.failure_mode(12)
def test_a_commit_whose_answer_is_lost_is_not_taken_for_a_failure(post: Post) -> None:
    def lose_the_answer(commit: Callable[[], None]) -> None:
        commit()
        raise OperationalError("server closed the connection unexpectedly")

    with business_commit(lose_the_answer):
        answer = post()

    assert (answer.status_code, code_of(answer), answer["Retry-After"]) == (503, "idempotency_unavailable", "1")
    retry = post()
    assert (retry.status_code, retry["Idempotency-Replayed"]) == (201, "true")
    assert (effects(), handler.attempts) == (["one"], [1])


@pytest.mark.failure_mode(12)
def test_a_commit_that_never_arrived_releases_nothing_and_runs_after_the_lease(post: Post) -> None:
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
        answer = post()

    assert (answer.status_code, code_of(answer), answer["Retry-After"]) == (503, "idempotency_unavailable", "1")
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


@pytest.mark.failure_mode(26)
def test_a_failing_on_commit_callback_leaves_the_outcome_recorded(post: Post) -> None:
    handler.after = lambda request: transaction.on_commit(fail)
    assert post().status_code == 500
    assert record().status == "completed"
    retry = post()
    assert (retry.status_code, retry["Idempotency-Replayed"]) == (201, "true")
    assert (effects(), handler.attempts) == (["one"], [1])


@pytest.mark.failure_mode(26)
def test_an_integrity_error_in_on_commit_frees_nothing(post: Post) -> None:
    def violate() -> None:
        raise IntegrityError("of the callback's own making")

    handler.after = lambda request: transaction.on_commit(violate)
    post()
    assert record().status == "completed"
    assert post().status_code == 201
    assert (effects(), handler.attempts) == (["one"], [1])
