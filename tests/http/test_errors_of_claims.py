"""The errors of ``claim()`` over HTTP: in a view of its own they are answered, in a protected view they are a crash."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django import db
from django.http import HttpRequest, HttpResponse, JsonResponse
from rest_framework.decorators import api_view

from idempotency import ACCEPTED, REEXECUTE, claim, current_claim, idempotent
from idempotency.exceptions import (
    IdempotencyError,
    InProgressError,
    KeyReusedError,
    LeaseLostError,
    OuterTransactionError,
    UnavailableError,
)
from idempotency.http.problems import response_for
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from tests.http.callers import Caller, Serve, claim_anew, effects, problem_code
from tests.http.test_problems import store_refusing
from tests.http.views import work

pytestmark = pytest.mark.django_db(transaction=True)

MIDDLEWARE = "idempotency.http.middleware.IdempotencyErrorMiddleware"


@pytest.fixture
def middleware(settings: Any) -> None:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, MIDDLEWARE]


def claiming(request: Any) -> HttpResponse:
    """A view that claims by itself, as one of Ninja or GraphQL does."""
    with claim("tests.block", account_id="a", key=request.GET["key"], payload=request.body.decode()) as run:
        if not run.replayed:
            run.result = work(request)[0]["id"]
    return JsonResponse({"id": run.result})


async def claiming_async(request: HttpRequest) -> HttpResponse:
    return await sync_to_async(claiming)(request)


@pytest.mark.usefixtures("middleware")
@pytest.mark.parametrize(
    "view", [claiming, claiming_async, api_view(["POST"])(claiming)], ids=["plain", "async", "drf"]
)
def test_the_middleware_answers_what_a_view_lets_through(
    alice: Caller, serve: Serve, transport: str, view: Callable[..., Any]
) -> None:
    alice.transport = transport
    serve(view)
    first = alice.post("/?key=k", {"a": 1})
    assert alice.post("/?key=k", {"a": 1}).content == first.content
    assert problem_code(alice.post("/?key=k", {"a": 2})) == "idempotency_key_reused"
    assert problem_code(alice.post("/?key=")) == "idempotency_key_invalid"
    assert effects() == 1
    claim_anew()
    busy = alice.post("/?key=k", {"a": 1})
    assert problem_code(busy) == "idempotency_in_progress"
    assert int(busy["Retry-After"]) >= 1


@pytest.mark.usefixtures("middleware")
def test_the_middleware_leaves_every_other_error_alone(alice: Caller, serve: Serve) -> None:
    def view(request: HttpRequest) -> HttpResponse:
        raise ValueError

    serve(view)
    refused = alice.post()
    assert refused.status_code == 500
    assert "problem" not in refused["Content-Type"]


def test_a_function_makes_the_response_of_an_error(settings: Any, rf: Any, caplog: pytest.LogCaptureFixture) -> None:
    request = rf.post("/")
    busy = response_for(InProgressError(retry_after=3), request)
    assert (problem_code(busy), busy.status_code, busy["Retry-After"]) == ("idempotency_in_progress", 409, "3")
    assert not caplog.messages
    assert problem_code(response_for(UnavailableError(retry_after=1), request)) == "idempotency_unavailable"
    error = OuterTransactionError("Call it outside of atomic().")
    assert error.reference in json.loads(response_for(error, request).content)["detail"]
    assert f"reference {error.reference}: Call it outside of atomic()." in caplog.text
    settings.IDEMPOTENCY = {"ERROR_RESPONSE": lambda request, error: HttpResponse(error.code, status=418)}
    assert response_for(InProgressError(retry_after=3), request).content == b"idempotency_in_progress"


# Inside of a protected view it is a crash of the handler

INNER: list[IdempotencyError] = [
    InProgressError(retry_after=3),
    KeyReusedError(),
    LeaseLostError(),
    UnavailableError(retry_after=1),
    OuterTransactionError(),
]


@pytest.mark.failure_mode(65)
@pytest.mark.parametrize("error", INNER, ids=lambda error: error.code)
@pytest.mark.parametrize("with_middleware", [False, True])
@pytest.mark.parametrize("drf", [False, True], ids=["plain", "drf"])
def test_the_error_of_an_inner_claim_is_no_answer_to_the_outer_key(
    alice: Caller, serve: Serve, settings: Any, error: IdempotencyError, with_middleware: bool, drf: bool
) -> None:
    if with_middleware:
        settings.MIDDLEWARE = [*settings.MIDDLEWARE, MIDDLEWARE]

    @idempotent("tests.outer", in_progress=ACCEPTED)
    def view(request: Any) -> HttpResponse:
        work(request)
        raise error

    serve(api_view(["POST"])(view) if drf else view)
    for attempt in (1, 2):
        crashed = alice.post(key="k")
        assert crashed.status_code == 500
        assert "problem" not in crashed["Content-Type"]
        assert effects() == 0
        record = IdempotencyRecord.objects.get()
        assert (record.status, record.attempt) == (Status.RECOVERABLE, attempt)


@pytest.mark.failure_mode(1)
def test_the_lease_that_the_handler_finds_lost_is_its_own(alice: Caller, serve: Serve) -> None:
    @idempotent("tests.renewing")
    def view(request: HttpRequest) -> HttpResponse:
        held = current_claim()
        assert held is not None
        held.ownership.lost = True
        held.ensure_owned()
        raise NotImplementedError

    serve(view)
    assert problem_code(alice.post(key="k")) == "idempotency_in_progress"


def test_a_failure_of_the_store_inside_of_a_handler_is_the_stores(alice: Caller, serve: Serve) -> None:
    @idempotent("tests.unavailable", transaction=False, recovery=REEXECUTE)
    def view(request: HttpRequest) -> HttpResponse:
        held = current_claim()
        assert held is not None
        with store_refusing("UPDATE", db.OperationalError("read-only")):
            held.renew()
        raise NotImplementedError

    serve(view)
    assert problem_code(alice.post(key="k")) == "idempotency_unavailable"
