"""How a run's transaction ends: broken by the handler, undone by it, or committed with a callback that fails."""

from __future__ import annotations

import pytest
from django.db import IntegrityError, connection, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from rest_framework import exceptions
from rest_framework.decorators import api_view
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import set_rollback

from idempotency import idempotent
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.http.callers import Caller, Serve, effects, problem_code
from tests.http.views import CrashError, plain_answer, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.failure_mode(24)
@pytest.mark.parametrize("status", [200, 400])
def test_a_swallowed_error_that_broke_the_transaction_is_not_answered_with_success(
    alice: Caller, serve: Serve, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    @idempotent("tests.swallowing")
    def view(request: HttpRequest) -> HttpResponse:
        work(request)
        try:
            with transaction.atomic(savepoint=False):  # what many of Django's own methods do
                raise IntegrityError
        except IntegrityError:
            pass
        return JsonResponse({}, status=status)

    serve(view)
    answer = alice.post(key="k")
    assert effects() == 0
    if status == 200:
        assert problem_code(answer) == "idempotency_transaction_broken"
        assert answer.status_code == 500
        assert "atomic()" in caplog.text
        assert "tests.swallowing" in caplog.text
        assert IdempotencyRecord.objects.get().status == Status.RECOVERABLE
    else:
        # A failure that has undone its writes says the truth, and is recorded.
        assert answer.status_code == 400
        assert alice.post(key="k")["Idempotency-Replayed"] == "true"
    assert effects() == 0


@pytest.mark.failure_mode(24)
@pytest.mark.postgres
@pytest.mark.parametrize("status", [200, 400])
def test_a_swallowed_error_that_postgresql_has_not_forgotten(alice: Caller, serve: Serve, status: int) -> None:
    runs: list[int] = []

    @idempotent("tests.swallowing")
    def view(request: HttpRequest) -> HttpResponse:
        runs.append(1)
        work(request)
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1 / 0")
        except Exception:  # noqa: BLE001 - the mistake that this is about
            pass
        return JsonResponse({}, status=status)

    serve(view)
    for count in (1, 2):
        assert problem_code(alice.post(key="k")) == "idempotency_transaction_broken"
        assert len(runs) == count
        assert effects() == 0


@pytest.mark.failure_mode(24)
def test_a_savepoint_keeps_an_error_from_breaking_the_transaction(alice: Caller, serve: Serve) -> None:
    @idempotent("tests.careful")
    def view(request: HttpRequest) -> HttpResponse:
        try:
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute("SELECT * FROM no_such_table")
        except Exception:  # noqa: BLE001 - whatever the database calls it
            pass
        return plain_answer(request)

    serve(view)
    assert alice.post(key="k").status_code == 201
    assert alice.post(key="k")["Idempotency-Replayed"] == "true"
    assert effects() == 1


@pytest.mark.failure_mode(25)
@pytest.mark.parametrize("atomic", [False, True], ids=["", "ATOMIC_REQUESTS"])
def test_raised_and_returned_failures_of_drf_are_both_defined(
    alice: Caller, serve: Serve, atomic: bool, request: pytest.FixtureRequest
) -> None:
    if atomic:
        request.getfixturevalue("atomic_requests")

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

    serve(view)
    # DRF's own set_rollback() is about ATOMIC_REQUESTS, so it does nothing without.
    kept = {"raise": 0, "undo": 0, "undo-as-drf": 0 if atomic else 1, "return": 1}
    for how, expected in kept.items():
        Transfer.objects.all().delete()
        first = alice.post(data={"how": how}, key=how)
        assert first.status_code == 400
        assert effects() == expected, how
        replay = alice.post(data={"how": how}, key=how)
        assert (replay.status_code, replay.content) == (400, first.content)
        assert replay["Idempotency-Replayed"] == "true"
        assert effects() == expected, how


@pytest.mark.failure_mode(25)
def test_a_plain_view_that_undoes_its_writes_may_answer_with_a_failure(alice: Caller, serve: Serve) -> None:
    runs: list[int] = []

    @idempotent("tests.undo")
    def view(request: HttpRequest) -> HttpResponse:
        runs.append(1)
        answer = plain_answer(request)
        transaction.set_rollback(True)
        answer.status_code = int(request.GET["as"])
        return answer

    serve(view)
    assert alice.post("/?as=409", key="k").status_code == 409
    assert alice.post("/?as=409", key="k")["Idempotency-Replayed"] == "true"
    assert len(runs) == 1
    # A success that has undone itself is a lie, and a passing failure isn't kept in any case.
    assert problem_code(alice.post("/?as=201", key="k2")) == "idempotency_transaction_broken"
    assert alice.post("/?as=503", key="k3").status_code == 503
    assert alice.post("/?as=503", key="k3").status_code == 503
    assert len(runs) == 4
    assert effects() == 0


@pytest.mark.failure_mode(26)
def test_an_on_commit_callback_that_raises_loses_nothing(alice: Caller, serve: Serve) -> None:
    runs: list[int] = []

    def fail() -> None:
        raise CrashError

    @idempotent("tests.callback")
    def view(request: HttpRequest) -> HttpResponse:
        runs.append(1)
        transaction.on_commit(fail)
        return plain_answer(request)

    serve(view)
    assert alice.post(key="k").status_code == 500
    assert effects() == 1
    assert IdempotencyRecord.objects.get().status == Status.COMPLETED
    replay = alice.post(key="k")
    assert replay.status_code == 201
    assert replay["Idempotency-Replayed"] == "true"
    assert len(runs) == 1
    assert effects() == 1


@pytest.mark.failure_mode(26)
def test_on_commit_runs_after_the_outcome_is_there_and_not_for_what_is_undone(alice: Caller, serve: Serve) -> None:
    seen: list[str] = []

    @idempotent("tests.callback")
    def view(request: HttpRequest) -> HttpResponse:
        transaction.on_commit(lambda: seen.append(IdempotencyRecord.objects.get().status))
        return plain_answer(request)

    serve(view)
    alice.post("/?status=503", key="k")
    assert seen == []
    IdempotencyRecord.objects.all().delete()
    alice.post(key="k")
    assert seen == ["completed"]
