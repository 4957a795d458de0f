"""``Idempotency-Status`` on every response to a request with a key, and what a problem says about a retry."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.decorators import login_required
from django.db import transaction
from django.http import HttpResponse, JsonResponse
from django.urls import path
from django.views import View

from idempotency import ACCEPTED, REEXECUTE, Attach, claim, idempotent
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from tests.http.callers import Caller, claim_anew
from tests.http.serving import OUTSIDE, Framework, Serve
from tests.http.views import CrashError, plain_answer, work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]

HEADER = "Idempotency-Status"


@pytest.fixture
def middleware(settings: Any) -> None:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "idempotency.http.middleware.IdempotencyMiddleware"]


def test_each_answer_of_a_protected_view_says_it(alice: Caller, framework: Framework) -> None:
    framework.serve()
    assert [alice.post(key="k")[HEADER] for _ in range(2)] == ["executed", "replayed"]
    assert alice.post(data={"a": 1}, key="k")[HEADER] == "reused"
    claim_anew()
    assert alice.post(key="k")[HEADER] == "in-progress"
    IdempotencyRecord.objects.update(status=Status.PARKED, lease_expires_at=None)
    assert alice.post(key="k")[HEADER] == "unknown"
    not_recorded = {
        "no key": alice.post(),
        "bad key": alice.post(key="a,b"),
        "bad payload": alice.post(data=b'{"a": 1e999}', key="l"),
        "a 503 of the handler": alice.post("/?status=503", key="n"),
    }
    if framework.name == "drf":
        not_recorded["what DRF itself refuses"] = refused = alice.post(data=b"{oops", key="m")
        assert (refused.status_code, refused["Idempotency-Key"]) == (400, "m")
    assert [case for case, answer in not_recorded.items() if answer[HEADER] != "not-recorded"] == []


def test_without_a_key_an_answer_says_nothing(alice: Caller, framework: Framework) -> None:
    framework.serve(required=False)
    assert HEADER not in alice.post()


def test_a_duplicate_that_gets_202_is_in_progress_and_a_job_until_it_ends(alice: Caller, serve: Serve) -> None:
    states = iter([202, 200])
    job = idempotent(
        "tests.job",
        in_progress=Attach(lambda scope: "/jobs/1/"),
        rebuild=lambda reference, request: HttpResponse(status=next(states)),
    )
    accepted = idempotent("tests.accepted", in_progress=ACCEPTED)(plain_answer)
    serve(job(lambda request: HttpResponse(status=202)), **{"accepted/": accepted})
    assert [alice.post(key="k")[HEADER] for _ in range(3)] == ["executed", "in-progress", "replayed"]
    alice.post("/accepted/", key="k")
    claim_anew()
    duplicate = alice.post("/accepted/", key="k")
    assert (duplicate.status_code, duplicate[HEADER]) == (202, "in-progress")


def test_a_response_that_is_no_longer_kept_is_recorded(alice: Caller, serve: Serve) -> None:
    serve(idempotent("tests.gone", body_ttl=timedelta(hours=1))(plain_answer))
    alice.post(key="k")
    IdempotencyRecord.objects.update(response_body=None, response_status=None, response_headers=None)
    assert alice.post(key="k")[HEADER] == "recorded"


@pytest.mark.usefixtures("middleware")
@pytest.mark.parametrize(
    ("policy", "status"),
    [({}, "not-recorded"), ({"transaction": False, "recovery": REEXECUTE}, "not-recorded"), (OUTSIDE, "unknown")],
    ids=["in a transaction", "outside, runs again", "outside, parked"],
)
def test_the_500_of_a_crash_has_the_headers_of_every_answer(
    alice: Caller, framework: Framework, transport: str, policy: Any, status: str
) -> None:
    alice.transport = transport
    framework.serve(work, **policy)
    crashed = alice.post("/?crash=1", key="k")
    assert crashed.status_code == 500
    assert (crashed[HEADER], crashed["Idempotency-Key"], crashed["Idempotency-Retention"]) == (status, "k", "259200")


@pytest.mark.usefixtures("middleware")
def test_a_crash_after_the_commit_was_an_execution(alice: Caller, serve: Serve) -> None:
    def fail() -> None:
        raise CrashError

    @idempotent("tests.callback")
    def view(request: Any) -> HttpResponse:
        transaction.on_commit(fail)
        return plain_answer(request)

    serve(view)
    crashed = alice.post(key="k")
    assert (crashed.status_code, crashed[HEADER]) == (500, "executed")
    assert alice.post(key="k")[HEADER] == "replayed"


class Mixed(View):
    def post(self, request: Any) -> HttpResponse:
        return plain_answer(request)

    @idempotent("tests.mixed")
    def patch(self, request: Any) -> HttpResponse:
        return plain_answer(request)


@pytest.mark.usefixtures("middleware")
def test_a_route_that_takes_no_key_ignores_it(alice: Caller, anonymous: Caller, serve: Serve, settings: Any) -> None:
    protected = idempotent("tests.protected")(plain_answer)
    serve(plain_answer, **{"mixed/": Mixed.as_view(), "protected/": protected})
    assert alice.post(key="k")[HEADER] == "ignored"
    assert HEADER not in alice.post()
    assert alice.post("/mixed/", key="k")[HEADER] == "ignored"
    assert alice.request("PATCH", "/mixed/", key="k")[HEADER] == "executed"
    assert alice.request("PUT", "/protected/", key="k")[HEADER] == "ignored"
    assert HEADER not in alice.post("/nowhere/", key="k")
    # What refuses a request before the handler is another matter: the route takes a key.
    settings.ROOT_URLCONF = (path("", login_required(protected)), path("mixed/", login_required(Mixed.as_view())))
    assert anonymous.post(key="k")[HEADER] == "not-recorded"
    assert anonymous.post("/mixed/", key="k")[HEADER] == "ignored"
    assert anonymous.request("PATCH", "/mixed/", key="k")[HEADER] == "not-recorded"


@pytest.mark.usefixtures("middleware")
def test_a_view_that_claims_by_itself_may_say_it_itself(alice: Caller, serve: Serve) -> None:
    @serve
    def view(request: Any) -> HttpResponse:
        with claim("tests.block", account_id="a", key=request.headers["Idempotency-Key"], payload=None) as run:
            run.result = 1
        return JsonResponse({}, headers={HEADER: "replayed" if run.replayed else "executed"})

    assert [alice.post(key="k")[HEADER] for _ in range(2)] == ["executed", "replayed"]
    claim_anew()
    assert alice.post(key="k")[HEADER] == "in-progress"


def test_the_type_of_a_problem_leads_to_its_page(alice: Caller, framework: Framework, settings: Any) -> None:
    framework.serve()
    assert alice.post().json()["type"] == "urn:idempotency:problem:key-missing"
    settings.IDEMPOTENCY = {"PROBLEM_DOCS": "https://docs.example.com/problems.html"}
    assert alice.post().json()["type"] == "https://docs.example.com/problems.html#key-missing"
