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

from idempotency import ACCEPTED, REEXECUTE, claim, require_claim
from idempotency.exceptions import (
    IdempotencyError,
    InProgressError,
    KeyReusedError,
    LeaseLostError,
    OuterTransactionError,
    UnavailableError,
)
from idempotency.http.problems import response_for
from tests.http.callers import Caller, assert_nothing_kept, assert_refused, claim_anew, problem_code
from tests.http.serving import Framework, Serve, serve_answer
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
    assert_refused(alice, "idempotency_key_reused", "/?key=k", {"a": 2})
    assert_refused(alice, "idempotency_key_invalid", "/?key=")
    claim_anew()
    busy = assert_refused(alice, "idempotency_in_progress", "/?key=k", {"a": 1})
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
def test_the_error_of_an_inner_claim_is_no_answer_to_the_outer_key(
    alice: Caller, framework: Framework, settings: Any, error: IdempotencyError, with_middleware: bool
) -> None:
    if with_middleware:
        settings.MIDDLEWARE = [*settings.MIDDLEWARE, MIDDLEWARE]

    def failing(request: Any) -> None:
        work(request)
        raise error

    framework.serve(failing, in_progress=ACCEPTED)
    assert "problem" not in assert_nothing_kept(alice, 500)["Content-Type"]


@pytest.mark.failure_mode(1)
def test_the_lease_that_the_handler_finds_lost_is_its_own(alice: Caller, serve: Serve) -> None:
    def finding() -> None:
        held = require_claim()
        held.ownership.lost = True
        held.ensure_owned()

    serve_answer(serve, finding)
    assert problem_code(alice.post(key="k")) == "idempotency_in_progress"


def test_a_failure_of_the_store_inside_of_a_handler_is_the_stores(alice: Caller, serve: Serve) -> None:
    def renewing() -> None:
        with store_refusing("UPDATE", db.OperationalError("read-only")):
            require_claim().renew()

    serve_answer(serve, renewing, transaction=False, recovery=REEXECUTE)
    assert problem_code(alice.post(key="k")) == "idempotency_unavailable"
