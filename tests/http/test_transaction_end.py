"""How a run's transaction ends: broken by the handler, undone by it, or committed with a callback that fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.http import HttpRequest, HttpResponse
from rest_framework import exceptions
from rest_framework.decorators import api_view
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import set_rollback

from idempotency import idempotent
from tests.http.callers import Caller, assert_nothing_kept, effects, problem_code, records, replayed
from tests.http.serving import Serve
from tests.http.views import plain_answer, work

pytestmark = pytest.mark.django_db(transaction=True)


def serve_ending(serve: Serve, end: Callable[[], object]) -> None:
    """Serve an operation that has its effect, does ``end`` to its transaction, and swallows the error of that."""

    @serve
    @idempotent("tests.ending")
    def view(request: HttpRequest) -> HttpResponse:
        answer = plain_answer(request)
        with suppress(Exception):
            end()
        return answer


@transaction.atomic(savepoint=False)  # as many of Django's own methods have it
def fail_without_a_savepoint() -> None:
    raise IntegrityError


@pytest.mark.failure_24
def test_an_error_that_broke_the_transaction_is_no_success(alice: Caller, serve: Serve, caplog: Any) -> None:
    serve_ending(serve, fail_without_a_savepoint)
    assert problem_code(assert_nothing_kept(alice, 500)) == "idempotency_transaction_broken"
    assert "atomic()" in caplog.text
    assert "tests.ending" in caplog.text
    # A failure that has undone its writes says the truth, and is recorded.
    replayed(alice, "/?status=400", key="k2", wrote=0)


@pytest.mark.failure_24
@pytest.mark.postgres
@pytest.mark.parametrize("status", [200, 400])
def test_a_swallowed_error_that_postgresql_has_not_forgotten(alice: Caller, serve: Serve, status: int) -> None:
    serve_ending(serve, lambda: connection.cursor().execute("SELECT 1 / 0"))
    assert problem_code(assert_nothing_kept(alice, 500, f"/?status={status}")) == "idempotency_transaction_broken"


@pytest.mark.failure_24
def test_a_savepoint_keeps_an_error_from_breaking_the_transaction(alice: Caller, serve: Serve) -> None:
    serve_ending(serve, transaction.atomic(lambda: connection.cursor().execute("SELECT * FROM no_such_table")))
    first, _ = replayed(alice)
    assert first.status_code == 201


@pytest.mark.failure_25
def test_raised_and_returned_failures_of_drf_are_both_defined(alice: Caller, serve: Serve, atomic: bool) -> None:
    @serve
    @api_view(["POST"])
    @idempotent("tests.raise_or_return")
    def view(request: Request) -> Response:
        answer, _ = work(request)
        if request.data["how"] == "raise":
            raise exceptions.ValidationError(answer)
        if request.data["how"] == "undo":
            transaction.set_rollback(True)
        if request.data["how"] == "undo-as-drf":
            set_rollback()
        return Response(answer, status=400)

    # DRF's own set_rollback() is about ATOMIC_REQUESTS, so it does nothing without.
    kept = {"raise": 0, "undo": 0, "undo-as-drf": 0 if atomic else 1, "return": 1}
    for how, wrote in kept.items():
        first, _ = replayed(alice, data={"how": how}, key=how, wrote=wrote)
        assert first.status_code == 400


@pytest.mark.failure_25
def test_a_plain_view_that_undoes_its_writes_may_answer_with_a_failure(alice: Caller, serve: Serve) -> None:
    serve_ending(serve, lambda: transaction.set_rollback(True))
    # A success that has undone itself is a lie, and a passing failure isn't kept in any case.
    assert problem_code(assert_nothing_kept(alice, 500, "/?status=201")) == "idempotency_transaction_broken"
    assert alice.post("/?status=503", key="k2").status_code == 503
    assert effects() == 0
    replayed(alice, "/?status=409", key="k3", wrote=0)


@pytest.mark.failure_26
def test_on_commit_runs_after_the_outcome_is_there_and_not_for_what_is_undone(alice: Caller, serve: Serve) -> None:
    seen: list[Any] = []
    serve_ending(serve, lambda: transaction.on_commit(lambda: seen.append(records())))
    alice.post("/?status=503", key="k")
    assert seen == []
    alice.post(key="k2")
    assert seen == [[("recoverable", 1), ("completed", 1)]]
