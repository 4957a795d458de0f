"""What is recorded of a run, what is not, and what becomes of its writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.db import IntegrityError
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from rest_framework import exceptions
from rest_framework.decorators import api_view
from rest_framework.response import Response

from idempotency import PARK, REEXECUTE, idempotent
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from tests.http.callers import Caller, Serve, effects, problem_code
from tests.http.views import CrashError, work

pytestmark = pytest.mark.django_db(transaction=True)

RETRIED = [408, 425, 429, 500, 502, 503, 599]
RECORDED = [200, 202, 204, 301, 302, 400, 402, 404, 409, 410, 422, 451]


class Conflict(exceptions.APIException):
    status_code = 409
    default_code = "conflict"


# 13: returned


@pytest.mark.scenario(13)
@pytest.mark.parametrize("status", RETRIED)
def test_nothing_is_kept_of_a_passing_failure_and_the_retry_runs(
    alice: Caller, serve_operation: Callable[..., None], status: int
) -> None:
    serve_operation()
    for attempt in (1, 2, 3):
        refused = alice.post(f"/?status={status}", key="k")
        assert refused.status_code == status
        assert "Idempotency-Replayed" not in refused
        assert effects() == 0
        record = IdempotencyRecord.objects.get()
        assert (record.status, record.attempt) == (Status.RECOVERABLE, attempt)
        assert record.response_status is None
        assert record.response_body is None


@pytest.mark.scenario(13)
def test_a_returned_failure_commits_with_its_writes_and_is_replayed(
    alice: Caller, serve_operation: Callable[..., None]
) -> None:
    serve_operation()
    for count, status in enumerate(RECORDED, start=1):
        key = f"key-{status}"
        first = alice.post(f"/?status={status}", key=key)
        assert first.status_code == status
        assert effects() == count
        replay = alice.post(f"/?status={status}", key=key)
        assert (replay.status_code, replay.content) == (status, first.content)
        assert replay["Idempotency-Replayed"] == "true"
        assert effects() == count


@pytest.mark.scenario(13)
def test_the_retry_of_a_passing_failure_takes_effect_once(alice: Caller, serve: Serve) -> None:
    statuses = iter([503, 429, 201])

    @idempotent("tests.recovers")
    def view(request: HttpRequest) -> HttpResponse:
        answer, _ = work(request)
        return JsonResponse(answer, status=next(statuses))

    serve(view)
    answers = [alice.post(key="k") for _ in range(5)]
    assert [answer.status_code for answer in answers] == [503, 429, 201, 201, 201]
    assert effects() == 1
    assert IdempotencyRecord.objects.get().attempt == 3


@pytest.mark.scenario(13)
@pytest.mark.parametrize("by", ["policy", "setting", "dotted path"])
def test_the_policy_says_what_is_recordable(
    alice: Caller, serve_operation: Callable[..., None], settings: Any, by: str
) -> None:
    if by == "policy":
        serve_operation(recordable=only_success)
    else:
        settings.IDEMPOTENCY = {"RECORDABLE": only_success if by == "setting" else f"{__name__}.only_success"}
        serve_operation()
    for _ in range(2):
        assert alice.post("/?status=404", key="k").status_code == 404
        assert effects() == 0
    alice.post("/?status=200", key="k2")
    assert alice.post("/?status=200", key="k2")["Idempotency-Replayed"] == "true"
    assert effects() == 1


def only_success(status: int) -> bool:
    return status < 300


# 13: raised

DETERMINISTIC = {
    "Http404": (lambda: Http404("no such account"), 404),
    "PermissionDenied": (lambda: PermissionDenied("not yours"), 403),
    "SuspiciousOperation": (lambda: SuspiciousOperation("odd"), 400),
    "BadRequest": (lambda: BadRequest("bad"), 400),
}
DRF_DETERMINISTIC = {
    "Http404": (lambda: Http404(), 404),
    "PermissionDenied": (lambda: PermissionDenied(), 403),
    "ValidationError": (lambda: exceptions.ValidationError({"amount": ["wrong"]}), 400),
    "NotFound": (lambda: exceptions.NotFound(), 404),
    "SuspiciousOperation": (lambda: SuspiciousOperation("odd"), 400),
    "BadRequest": (lambda: BadRequest("bad"), 400),
    "APIException of 409": (lambda: Conflict(), 409),
    "NotAuthenticated": (lambda: exceptions.NotAuthenticated(), 401),
}
CRASHES = {
    "an exception": (lambda: CrashError(), 500),
    "IntegrityError": (lambda: IntegrityError("lost a race"), 500),
}
DRF_TRANSIENT = {
    **CRASHES,
    "Throttled": (lambda: exceptions.Throttled(wait=7), 429),
    "APIException": (lambda: exceptions.APIException(), 500),
}


def serve_raising(serve: Serve, error: Callable[[], Exception], *, drf: bool, **policy: Any) -> list[int]:
    """Serve a view that has its effect and then raises. The list grows by one each time that it runs."""
    runs: list[int] = []

    @idempotent("tests.raising", **policy)
    def view(request: Any) -> Any:
        runs.append(1)
        work(request)
        raise error()

    serve(api_view(["POST"])(view) if drf else view)
    return runs


@pytest.mark.scenario(13)
@pytest.mark.parametrize(
    ("error", "status", "drf"),
    [
        *(pytest.param(*case, False, id=f"plain-{name}") for name, case in DETERMINISTIC.items()),
        *(pytest.param(*case, True, id=f"drf-{name}") for name, case in DRF_DETERMINISTIC.items()),
    ],
)
def test_a_raised_deterministic_failure_undoes_its_writes_and_is_recorded(
    alice: Caller, serve: Serve, error: Callable[[], Exception], status: int, drf: bool
) -> None:
    runs = serve_raising(serve, error, drf=drf)
    first = alice.post(key="k")
    assert first.status_code == status
    assert first["Idempotency-Key"] == "k"
    assert effects() == 0
    replay = alice.post(key="k")
    assert (replay.status_code, replay.content) == (status, first.content)
    assert replay["Content-Type"] == first["Content-Type"]
    assert replay["Idempotency-Replayed"] == "true"
    assert alice.post(data={"another": 1}, key="k").status_code == 422
    assert len(runs) == 1
    assert effects() == 0
    record = IdempotencyRecord.objects.get()
    assert (record.status, record.attempt, record.response_status) == (Status.COMPLETED, 1, status)


@pytest.mark.scenario(13)
@pytest.mark.parametrize(
    ("error", "status", "drf"),
    [
        *(pytest.param(*case, False, id=f"plain-{name}") for name, case in CRASHES.items()),
        *(pytest.param(*case, True, id=f"drf-{name}") for name, case in DRF_TRANSIENT.items()),
    ],
)
def test_nothing_is_kept_of_a_crash_and_the_retry_runs(
    alice: Caller, serve: Serve, error: Callable[[], Exception], status: int, drf: bool
) -> None:
    runs = serve_raising(serve, error, drf=drf)
    for count in (1, 2):
        answer = alice.post(key="k")
        assert answer.status_code == status
        assert "Idempotency-Replayed" not in answer
        assert len(runs) == count
        assert effects() == 0
        assert IdempotencyRecord.objects.get().status == Status.RECOVERABLE


@pytest.mark.scenario(13)
def test_a_throttled_handlers_retry_after_survives(alice: Caller, serve: Serve) -> None:
    serve_raising(serve, lambda: exceptions.Throttled(wait=7), drf=True)
    assert alice.post(key="k")["Retry-After"] == "7"


@pytest.mark.scenario(13)
def test_a_crash_is_shown_to_the_projects_exception_handler_once(alice: Caller, serve: Serve, settings: Any) -> None:
    shown: list[Exception] = []
    _handlers["current"] = shown.append
    settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "EXCEPTION_HANDLER": f"{__name__}.noting_handler"}
    serve_raising(serve, CrashError, drf=True)
    assert alice.post(key="k").status_code == 500
    assert len(shown) == 1


_handlers: dict[str, Callable[[Exception], Any]] = {}


def noting_handler(error: Exception, context: Any) -> Response | None:
    _handlers["current"](error)
    return None


@pytest.mark.scenario(13)
def test_an_exception_handler_that_fails_leaves_a_claim_to_retry(alice: Caller, serve: Serve, settings: Any) -> None:
    def fail(error: Exception) -> None:
        raise ValueError("the exception handler's own")

    _handlers["current"] = fail
    settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "EXCEPTION_HANDLER": f"{__name__}.noting_handler"}
    runs = serve_raising(serve, Conflict, drf=True)
    for count in (1, 2):
        assert alice.post(key="k").status_code == 500
        assert len(runs) == count
        assert effects() == 0
        assert IdempotencyRecord.objects.get().status == Status.RECOVERABLE


# 13: outside of a transaction, where nothing can be undone


@pytest.mark.scenario(13)
@pytest.mark.parametrize("drf", [False, True], ids=["plain", "drf"])
def test_a_failure_raised_outside_of_a_transaction_is_recorded_with_what_it_left(
    alice: Caller, serve: Serve, drf: bool
) -> None:
    runs = serve_raising(serve, Http404, drf=drf, transaction=False, recovery=PARK)
    assert [alice.post(key="k").status_code for _ in range(3)] == [404, 404, 404]
    assert len(runs) == 1
    assert effects() == 1


@pytest.mark.scenario(13)
@pytest.mark.parametrize("query", ["?crash=1", "?status=503"])
def test_a_crash_of_an_operation_that_may_have_had_its_effect_is_parked(
    alice: Caller, serve_operation: Callable[..., None], query: str
) -> None:
    serve_operation(transaction=False, recovery=PARK)
    assert alice.post(f"/{query}", key="k").status_code >= 500
    for _ in range(2):
        assert problem_code(alice.post(f"/{query}", key="k")) == "idempotency_outcome_unknown"
    assert effects() == 1
    assert IdempotencyRecord.objects.get().status == Status.PARKED


@pytest.mark.scenario(13)
@pytest.mark.parametrize("query", ["?crash=1", "?status=503"])
def test_a_crash_of_an_operation_whose_effects_carry_a_key_is_run_again(
    alice: Caller, serve_operation: Callable[..., None], query: str
) -> None:
    serve_operation(transaction=False, recovery=REEXECUTE)
    for count in (1, 2):
        assert alice.post(f"/{query}", key="k").status_code >= 500
        assert effects() == count  # what the author's derived key must make harmless
    assert IdempotencyRecord.objects.get().status == Status.RECOVERABLE
