"""The errors of the wire contract: status, code, headers and shape, in plain and in DRF views."""

import json
import re
from datetime import timedelta
from unittest.mock import ANY

import pytest
from asgiref.sync import sync_to_async
from django import db
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse, JsonResponse
from django.urls import path
from rest_framework.decorators import api_view, permission_classes
from rest_framework.exceptions import APIException
from rest_framework.permissions import AllowAny
from rest_framework.response import Response

from idempotency import ACCEPTED, REEXECUTE, claim, exceptions, idempotent, require_claim
from idempotency.http.problems import response_for
from idempotency.keys import KeyStatusView
from idempotency.models import IdempotencyRecord
from tests.http.callers import (
    PROBLEMS,
    assert_nothing_kept,
    assert_refused,
    effects,
    problem_code,
    records,
    refusals,
    reopen_claim,
    replayed,
    store_refusing,
)
from tests.http.serving import Framework, policies, serve_answer
from tests.http.views import drf_answer, plain_answer, work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]

STANDARDIZED = "drf_standardized_errors.handler.exception_handler"


def test_an_anonymous_caller_is_refused_by_a_public_protected_view(anonymous, settings):
    """The refusal names a scheme: RFC 9110, section 15.5.2."""
    protected = idempotent("tests.open")(plain_answer)
    drf = api_view(["POST"])(permission_classes([AllowAny])(idempotent("tests.open_drf")(drf_answer)))
    status = KeyStatusView.as_view(operation="tests.open")
    settings.ROOT_URLCONF = (path("", protected), path("drf/", drf), path("key/", status))
    for url, method, scheme in (("/", "POST", ""), ("/drf/", "POST", "Token"), ("/key/", "GET", "")):
        refused = assert_refused(anonymous, "idempotency_account_required", url, method=method, key="k")
        assert scheme in refused["WWW-Authenticate"]


@pytest.mark.failure_29
@pytest.mark.parametrize("error", ["OperationalError", "InternalError", "InterfaceError", "IntegrityError"])
def test_nothing_runs_without_a_store(alice, framework, error, caplog):
    framework.serve()
    with store_refusing("INSERT", getattr(db, error)("read-only")):
        refused = assert_refused(alice, "idempotency_unavailable", key="k")
    assert int(refused["Retry-After"]) >= 1
    assert refused["Idempotency-Key"] == "k"
    assert "idempotency_unavailable" in caplog.text
    replayed(alice)


@pytest.mark.failure_29
def test_an_outcome_that_cannot_be_written_rolls_back_the_run(alice, framework):
    framework.serve()
    with store_refusing("UPDATE", db.OperationalError("disk full")):
        assert problem_code(alice.post(key="k")) == "idempotency_unavailable"
    assert effects() == 0
    reopen_claim(lease=-timedelta(seconds=1))  # the release failed too, so the lease expires
    replayed(alice)


@pytest.mark.failure_10
@pytest.mark.parametrize(
    ("name", "value"), [("RETENTION", timedelta(0)), ("METHODS", ["post", "patch"]), ("RECORDABLE", "no.such.thing")]
)
@policies
def test_nothing_runs_under_a_wrong_setting(alice, framework, settings, caplog, name, value, policy):
    framework.serve(**policy)
    settings.IDEMPOTENCY = {name: value}
    for _ in range(2):
        assert alice.post(key="k").status_code == 500
    wrong = f"IDEMPOTENCY[{name!r}]"
    assert f"ImproperlyConfigured: {wrong}" in caplog.text
    with pytest.raises(ImproperlyConfigured, match=re.escape(wrong)), claim("tests.block", account_id="1", key="k"):
        pytest.fail("The block ran.")
    assert (effects(), records()) == (0, [])


@pytest.mark.parametrize("debug", [False, True])
def test_a_mistake_of_the_server_is_reported_to_its_developers(alice, framework, settings, caplog, debug):
    settings.DEBUG = debug
    framework.serve(max_response_body=1)
    refused = alice.post(key="a-long-key-of-a-client")
    assert problem_code(refused) == "idempotency_response_unrecordable"
    detail = json.loads(refused.content)["detail"]
    assert "Raise max_response_body" in caplog.text
    assert "key a-long-k… (22 characters)" in caplog.text
    assert "a-long-key-of-a-client" not in caplog.text
    assert ("Raise max_response_body" in detail, "tests." in detail) == (
        debug,
        debug,
    )  # the remedy, and the operation's name
    if not debug:
        reference = detail.rpartition(" ")[2].removesuffix(".")
        assert len(reference) == 12
        assert f"reference {reference}" in caplog.text


def enveloping_handler(error, context):
    assert isinstance(error, APIException)
    assert context["view"] is not None
    assert error.get_full_details() == {"message": str(error), "code": error.get_codes()}
    return Response({"oops": error.get_codes()}, status=error.status_code, headers={"Retry-After": "7"})


def other_envelope(request, error):
    assert request.method == "POST"
    return JsonResponse({"oops": error.code}, status=error.status_code, headers={"Retry-After": str(error.retry_after)})


def oops(status, code):
    return {"oops": code}


def standardized(status, code):
    error = {"code": code, "detail": ANY, "attr": None}
    return {"type": "client_error" if status < 500 else "server_error", "errors": [error]}


@pytest.mark.failure_73
@pytest.mark.parametrize(
    ("name", "setting", "value", "body"),
    [
        # A profile, whose own names ERROR_RESPONSE replaces.
        ("plain", "IDEMPOTENCY", {"ERROR_RESPONSE": other_envelope, "PROFILE": "acp"}, oops),
        ("drf", "IDEMPOTENCY", {"ERROR_RESPONSE": other_envelope, "PROFILE": "acp"}, oops),
        ("plain", "IDEMPOTENCY", {"ERROR_RESPONSE": f"{__name__}.other_envelope"}, oops),
        ("drf", "REST_FRAMEWORK", {"EXCEPTION_HANDLER": f"{__name__}.enveloping_handler"}, oops),
        ("drf", "REST_FRAMEWORK", {"EXCEPTION_HANDLER": STANDARDIZED}, standardized),
    ],
    ids=["plain", "drf", "dotted path", "DRF's exception handler", "drf-standardized-errors"],
)
def test_a_setting_replaces_the_shape_of_errors(alice, serve, settings, name, setting, value, body):
    if body is standardized:
        pytest.importorskip("drf_standardized_errors")
    setattr(settings, setting, {**getattr(settings, setting, {}), **value})
    Framework(name, serve).serve()
    answers = refusals(alice)
    IdempotencyRecord.objects.update(status="completed", response_status=7)
    answers["idempotency_outcome_unreadable"] = alice.post(data={"amount": 1}, key="k")
    for code, answer in answers.items():
        assert (answer.status_code, answer["Content-Type"]) == (PROBLEMS[code], "application/json")
        assert answer.json() == body(answer.status_code, code)
    assert effects() == 1


def test_a_drf_view_of_a_json_flavour_still_returns_problem_json(alice, serve):
    Framework("drf", serve).serve()
    assert_refused(alice, "idempotency_key_missing", headers={"Accept": "application/json; indent=2"})


def claiming(request):
    """A view that calls ``claim()`` itself, as a Ninja or GraphQL view may."""
    key = request.headers["Idempotency-Key"]
    with claim("tests.block", account_id="a", key=key, payload=request.body.decode()) as run:
        if not run.replayed:
            run.result = work(request)[0]["id"]
    return JsonResponse({"id": run.result}, headers={"Idempotency-Status": "replayed" if run.replayed else "executed"})


async def claiming_async(request):
    return await sync_to_async(claiming)(request)


@pytest.mark.usefixtures("middleware")
@pytest.mark.parametrize(
    "view", [claiming, claiming_async, api_view(["POST"])(claiming)], ids=["plain", "async", "drf"]
)
def test_the_middleware_answers_the_errors_that_a_view_raises(alice, serve, transport, view, settings):
    serve(view)
    first, again = (alice.post(data={"a": 1}, key="k") for _ in range(2))
    assert again.content == first.content
    assert (first["Idempotency-Status"], again["Idempotency-Status"]) == ("executed", "replayed")  # set by the view
    assert_refused(alice, "idempotency_key_reused", data={"a": 2}, key="k")
    assert_refused(alice, "idempotency_key_invalid", key="")
    reopen_claim()
    busy = assert_refused(alice, "idempotency_in_progress", data={"a": 1}, key="k")
    assert (int(busy["Retry-After"]) >= 1, busy["Idempotency-Status"]) == (True, "in-progress")
    settings.IDEMPOTENCY = {"ERROR_RESPONSE": other_envelope}
    assert alice.post(key="").json() == {"oops": "idempotency_key_invalid"}


@pytest.mark.usefixtures("middleware")
def test_the_middleware_leaves_every_other_error_alone(alice, serve):
    @serve
    def view(request):
        raise ValueError

    refused = alice.post()
    assert (refused.status_code, "problem" in refused["Content-Type"]) == (500, False)


def test_a_function_makes_the_response_of_an_error(settings, rf, caplog):
    request = rf.post("/")
    busy = response_for(exceptions.InProgressError(retry_after=3), request)
    assert problem_code(busy) == "idempotency_in_progress"
    assert json.loads(busy.content)["type"] == "urn:idempotency:problem:in-progress"
    assert not caplog.messages
    assert problem_code(response_for(exceptions.UnavailableError(retry_after=1), request)) == "idempotency_unavailable"
    error = exceptions.OuterTransactionError("Call it outside of atomic().")
    assert error.reference in json.loads(response_for(error, request).content)["detail"]
    logged = f"(idempotency_outer_transaction), reference {error.reference}: Call it outside of atomic()."
    assert caplog.records[-1].getMessage() == f"A claim() block answered 500 {logged}"
    settings.IDEMPOTENCY = {"ERROR_RESPONSE": lambda request, error: HttpResponse(f"{request.method} {error.code}")}
    assert response_for(exceptions.InProgressError(retry_after=3), request).content == b"POST idempotency_in_progress"


INNER = [
    exceptions.InProgressError(retry_after=3),
    exceptions.LeaseLostError(),
    exceptions.UnavailableError(retry_after=1),
]


@pytest.mark.failure_65
@pytest.mark.parametrize("error", INNER, ids=lambda error: error.code)
@pytest.mark.parametrize("with_middleware", [False, True])
def test_the_error_of_an_inner_claim_does_not_answer_the_outer_key(alice, framework, error, with_middleware, request):
    if with_middleware:
        request.getfixturevalue("middleware")

    def failing(request):
        work(request)
        raise error

    framework.serve(failing, in_progress=ACCEPTED, key_required=False)
    assert "problem" not in assert_nothing_kept(alice, 500)["Content-Type"]
    if not with_middleware:  # the middleware answers it, as it does in an unprotected view
        without_a_key = alice.post()
        assert (without_a_key.status_code, "problem" in without_a_key["Content-Type"]) == (500, False)


@pytest.mark.failure_65
def test_a_projects_answer_to_the_error_of_an_inner_claim_is_kept(alice, serve, settings):
    def reuse():
        raise exceptions.KeyReusedError

    answer = lambda error, context: Response({"refused": type(error).__name__}, status=400)  # noqa: E731
    settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "EXCEPTION_HANDLER": answer}
    serve_answer(serve, reuse, framework="drf")
    first, _ = replayed(alice, wrote=0)
    assert (first.status_code, first.json()) == (400, {"refused": "KeyReusedError"})


def test_a_store_failure_inside_a_handler_is_unavailable(alice, serve):
    def renewing():
        with store_refusing("UPDATE", db.OperationalError("read-only")):
            require_claim().renew()

    serve_answer(serve, renewing, transaction=False, recovery=REEXECUTE)
    assert problem_code(alice.post(key="k")) == "idempotency_unavailable"
