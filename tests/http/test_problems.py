"""The errors of the wire contract: status, code, headers and shape, in plain and in DRF views."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django import db
from django.http import HttpResponse, JsonResponse
from django.urls import path
from rest_framework.decorators import api_view, permission_classes, renderer_classes
from rest_framework.exceptions import APIException
from rest_framework.permissions import AllowAny
from rest_framework.renderers import StaticHTMLRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from idempotency import idempotent
from idempotency.models import IdempotencyRecord
from tests.http.callers import Caller, Serve, claim_anew, effects, problem_code
from tests.http.views import drf_answer, plain_answer

pytestmark = pytest.mark.django_db(transaction=True)


def test_an_anonymous_caller_is_refused_by_a_plain_view(anonymous: Caller, settings: Any) -> None:
    settings.ROOT_URLCONF = (path("", idempotent("tests.open")(plain_answer)),)
    refused = anonymous.post(key="k")
    assert refused.status_code == 401
    assert problem_code(refused) == "idempotency_account_required"
    assert effects() == 0
    assert not IdempotencyRecord.objects.exists()


def test_an_anonymous_caller_is_refused_by_a_drf_view_that_lets_everybody_in(anonymous: Caller, serve: Serve) -> None:
    serve(api_view(["POST"])(permission_classes([AllowAny])(idempotent("tests.open")(drf_answer))))
    refused = anonymous.post(key="k")
    assert refused.status_code == 401
    assert problem_code(refused) == "idempotency_account_required"
    assert refused["WWW-Authenticate"] == "Token"
    assert effects() == 0


@pytest.mark.parametrize("account", ["", "a" * 256, "a\x00b", "a\nb"], ids=["empty", "long", "NUL", "line feed"])
def test_an_account_that_no_database_could_hold_is_refused(alice: Caller, serve: Serve, account: str) -> None:
    serve(idempotent("tests.account", account=lambda request: account)(plain_answer))
    assert problem_code(alice.post(key="k")) == "idempotency_account_required"
    assert effects() == 0


def test_an_account_resolver_that_returns_no_text_is_a_mistake_of_the_project(alice: Caller, serve: Serve) -> None:
    serve(idempotent("tests.account", account=lambda request: request.user.pk)(plain_answer))
    assert alice.post(key="k").status_code == 500
    assert effects() == 0
    assert not IdempotencyRecord.objects.exists()


@pytest.mark.parametrize(
    "body", [b'{"amount": NaN}', b'{"amount": Infinity}', b'{"amount": 1e400}', b"[" * 500 + b"]" * 500]
)
def test_a_payload_without_a_canonical_form_is_refused_by_a_plain_view(
    alice: Caller, serve: Serve, body: bytes
) -> None:
    serve(idempotent("tests.plain")(plain_answer))
    refused = alice.post(data=body, key="k")
    assert refused.status_code == 400
    assert problem_code(refused) == "idempotency_payload_invalid"
    assert refused["Idempotency-Key"] == "k"
    assert effects() == 0
    assert not IdempotencyRecord.objects.exists()


@contextmanager
def store_refusing(statement: str, error: Exception) -> Iterator[None]:
    """A database that answers every statement on the record's table that starts so with an error."""

    def refuse(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.strip().upper().startswith(statement) and "idempotency_record" in sql:
            raise error
        return execute(sql, params, many, context)

    with db.connection.execute_wrapper(refuse):
        yield


@pytest.mark.failure_mode(29)
@pytest.mark.parametrize("error", ["OperationalError", "InternalError", "InterfaceError", "IntegrityError"])
def test_a_store_that_cannot_be_written_is_503_and_nothing_runs(
    alice: Caller, serve_operation: Callable[..., None], error: str, caplog: pytest.LogCaptureFixture
) -> None:
    serve_operation()
    with store_refusing("INSERT", getattr(db, error)("read-only")):
        refused = alice.post(key="k")
    assert refused.status_code == 503
    assert problem_code(refused) == "idempotency_unavailable"
    assert int(refused["Retry-After"]) >= 1
    assert refused["Idempotency-Key"] == "k"
    assert effects() == 0
    assert "idempotency_unavailable" in caplog.text
    assert alice.post(key="k").status_code == 201
    assert effects() == 1


@pytest.mark.failure_mode(29)
def test_an_outcome_that_cannot_be_written_undoes_the_run(alice: Caller, serve_operation: Callable[..., None]) -> None:
    serve_operation()
    with store_refusing("UPDATE", db.OperationalError("disk full")):
        refused = alice.post(key="k")
    assert problem_code(refused) == "idempotency_unavailable"
    assert effects() == 0
    claim_anew(lease=-timedelta(seconds=1))  # it could not be released either, so its lease runs out
    assert alice.post(key="k").status_code == 201
    assert effects() == 1


@pytest.mark.parametrize("debug", [False, True])
def test_a_mistake_of_the_server_is_told_to_its_developers_only(
    alice: Caller, serve_operation: Callable[..., None], settings: Any, caplog: pytest.LogCaptureFixture, debug: bool
) -> None:
    settings.DEBUG = debug
    serve_operation(max_body=1)
    refused = alice.post(key="a-long-key-of-a-client")
    assert problem_code(refused) == "idempotency_response_unrecordable"
    detail = json.loads(refused.content)["detail"]
    remedy = "Raise max_body"
    assert remedy in caplog.text
    assert "key a-long-k… (22 characters)" in caplog.text
    assert "a-long-key-of-a-client" not in caplog.text
    if debug:
        assert remedy in detail
    else:
        assert remedy not in detail
        assert "tests." not in detail  # the operation's name
        reference = detail.rpartition(" ")[2].removesuffix(".")
        assert len(reference) == 12
        assert f"reference {reference}" in caplog.text


def test_drf_errors_go_through_the_projects_exception_handler(alice: Caller, serve: Serve, settings: Any) -> None:
    settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "EXCEPTION_HANDLER": f"{__name__}.enveloping_handler"}
    serve(api_view(["POST"])(idempotent("tests.drf")(drf_answer)))
    alice.post(data={"amount": 1}, key="k")
    refused = alice.post(data={"amount": 2}, key="k")
    assert refused.status_code == 422
    assert refused["Content-Type"] == "application/json"
    assert json.loads(refused.content) == {"error": {"code": "idempotency_key_reused", "status": 422}}
    assert effects() == 1


def enveloping_handler(error: Exception, context: Any) -> Response:
    assert isinstance(error, APIException)
    assert context["view"] is not None
    assert error.get_full_details() == {"message": str(error), "code": error.get_codes()}
    return Response({"error": {"code": error.get_codes(), "status": error.status_code}}, status=error.status_code)


def test_drf_errors_are_rendered_by_the_views_renderer(alice: Caller, serve: Serve) -> None:
    class UpperCaseRenderer(StaticHTMLRenderer):
        def render(self, data: Any, *args: Any, **kwargs: Any) -> str:
            return f"<p>{data['code'].upper()}</p>"

    serve(api_view(["POST"])(renderer_classes([UpperCaseRenderer])(idempotent("tests.html")(drf_answer))))
    refused = alice.post()
    assert refused.status_code == 400
    assert refused["Content-Type"].startswith("text/html")
    assert refused.content == b"<p>IDEMPOTENCY_KEY_MISSING</p>"


def other_envelope(request: Any, error: Any) -> HttpResponse:
    assert request.method == "POST"
    response = JsonResponse({"oops": error.code}, status=error.status_code)
    if error.retry_after is not None:
        response["Retry-After"] = str(error.retry_after)
    return response


@pytest.mark.parametrize("setting", [other_envelope, f"{__name__}.other_envelope"], ids=["callable", "dotted path"])
def test_one_setting_replaces_the_shape_of_every_error(
    alice: Caller, serve_operation: Callable[..., None], settings: Any, setting: Any
) -> None:
    settings.IDEMPOTENCY = {"ERROR_RESPONSE": setting}
    serve_operation()
    assert json.loads(alice.post().content) == {"oops": "idempotency_key_missing"}
    alice.post(data={"amount": 1}, key="k")
    reused = alice.post(data={"amount": 2}, key="k")
    assert (reused.status_code, json.loads(reused.content)) == (422, {"oops": "idempotency_key_reused"})
    assert reused["Idempotency-Key"] == "k"
    claim_anew()
    conflict = alice.post(data={"amount": 1}, key="k")
    assert (conflict.status_code, json.loads(conflict.content)) == (409, {"oops": "idempotency_in_progress"})
    assert int(conflict["Retry-After"]) >= 1
    assert effects() == 1


def test_a_drf_view_of_a_json_flavour_still_says_problem_json(alice: Caller, serve: Serve) -> None:
    serve(api_view(["POST"])(idempotent("tests.drf")(drf_answer)))
    response = alice.post(headers={"Accept": "application/json; indent=2"})
    assert problem_code(response) == "idempotency_key_missing"


def test_a_drf_handler_sees_the_request_it_would_see_unprotected(alice: Caller, serve: Serve) -> None:
    seen: list[Any] = []

    @api_view(["POST"])
    @idempotent("tests.seen")
    def view(request: Request) -> Response:
        seen.append((type(request), request.data, request.auth is not None))
        return Response(status=204)

    serve(view)
    assert alice.post(data={"amount": 1}, key="k").status_code == 204
    assert seen == [(Request, {"amount": 1}, True)]


def test_what_drf_refuses_before_the_claim_echoes_the_key_too(alice: Caller, serve: Serve) -> None:
    serve(api_view(["POST"])(idempotent("tests.echo")(drf_answer)))
    refused = alice.post(data=b"{oops", key="k")
    assert (refused.status_code, refused["Idempotency-Key"]) == (400, "k")
    assert effects() == 0
    answered = alice.post(key="k")
    assert (answered.status_code, answered["Idempotency-Key"]) == (201, "k")
