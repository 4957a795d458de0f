"""A handler goes on after an error, asks for a rollback or exits; or it is called inside a transaction."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from django.db import DataError, IntegrityError, connection, transaction
from django.http import HttpResponse

from idempotency.protocol import execution
from tests.concurrency.conftest import Post
from tests.concurrency.failures import problem
from tests.concurrency.traces import effects, state
from tests.concurrency.urls import handler


@pytest.mark.failure_mode(24)
def test_a_swallowed_database_error_is_never_answered_with_success(
    post: Post, caplog: pytest.LogCaptureFixture
) -> None:
    def swallow(request: Any) -> None:
        if len(handler.attempts) > 1:
            return
        with suppress(IntegrityError), transaction.atomic(savepoint=False):
            raise IntegrityError("a duplicate that the handler thinks nothing of")

    handler.after = swallow
    answer = post()
    assert problem(answer) == (500, "idempotency_transaction_broken")
    assert "race.inside" in caplog.text
    assert effects() == []
    assert post().status_code == 201
    assert effects() == ["one"]


@pytest.mark.failure_mode(24)
@pytest.mark.postgres
def test_a_statement_that_broke_the_transaction_unseen_is_noticed(post: Post) -> None:
    def swallow(request: Any) -> None:
        with suppress(DataError), connection.cursor() as cursor:  # this is the careless handler
            cursor.execute("SELECT 1 / 0")

    handler.after = swallow
    answer = post()
    assert problem(answer) == (500, "idempotency_transaction_broken")
    assert state() == ("recoverable", [])


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
    assert state() == ("in_progress", [])
    assert execution.current_claim() is None


def test_an_open_transaction_is_an_error_that_names_the_remedy(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    with transaction.atomic():
        answer = post()
    assert problem(answer) == (500, "idempotency_outer_transaction")
    assert "non_atomic_requests" in caplog.text
    assert (effects(), handler.attempts) == ([], [])
