"""What an answer says of its key: ``Idempotency-Status``, and the names that each profile's own source gives."""

import json
from datetime import timedelta

import pytest
from django.contrib.auth.decorators import login_required
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.http import HttpResponse, JsonResponse
from django.urls import path

from idempotency import ACCEPTED, PARK, REEXECUTE, Attach, Operation, claim, exceptions, idempotent
from idempotency.http.checks import check_profiles
from idempotency.http.key_status import KeyStatusView
from idempotency.http.problems import PROFILES, response_for
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from tests.http.callers import claim_anew, effects
from tests.http.serving import OUTSIDE, serve_answer
from tests.http.views import CrashError, PlainView, plain_answer, work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]

ERRORS = {
    error.code: error
    for error in vars(exceptions).values()
    if isinstance(error, type) and issubclass(error, exceptions.IdempotencyError) and error.title != "Idempotency error"
}


#: The status of each answer, and its body without the message for people.
ANSWERS = {
    "stripe": {
        "missing": (400, "invalid_request_error", "idempotency_key_missing"),
        "invalid": (400, "invalid_request_error", "idempotency_key_invalid"),
        "reused": (400, "idempotency_error", "idempotency_key_reused"),
        "running": (409, "idempotency_error", "idempotency_key_in_use"),
    },
    "acp": {  # 6.1, 6.2 and 6.4
        "missing": (400, "invalid_request", "idempotency_key_required"),
        "invalid": (400, "invalid_request", "idempotency_key_invalid"),
        "reused": (422, "invalid_request", "idempotency_conflict"),
        "running": (409, "invalid_request", "idempotency_in_flight"),
    },
}


@pytest.mark.parametrize("profile", ANSWERS)
def test_a_profile_is_told_as_by_its_source(alice, framework, settings, profile):
    settings.IDEMPOTENCY = {"PROFILE": profile}
    framework.serve()
    first, replay = (alice.post(data={"amount": 1}, key="k") for _ in range(2))
    assert "Idempotent-Replayed" not in first
    assert (replay["Idempotent-Replayed"], "Idempotency-Replayed" in replay) == ("true", False)
    assert (replay.status_code, replay.content) == (first.status_code, first.content)
    refused = {"missing": alice.post(), "invalid": alice.post(key="a,b"), "reused": alice.post(key="k")}
    claim_anew()
    refused["running"] = alice.post(data={"amount": 1}, key="k")
    assert refused["reused"]["Idempotency-Key"] == "k"
    assert int(refused["running"]["Retry-After"]) >= 1
    for case, answer in refused.items():
        body = answer.json()
        status, type_, code = ANSWERS[profile][case]
        assert (answer.status_code, answer["Content-Type"]) == (status, "application/json")
        told = {"type": type_, "code": code}
        assert body.get("error", body).pop("message")
        assert body == ({"error": told} if profile == "stripe" else told)
    assert effects() == 1


@pytest.fixture
def checkout(framework, serve, settings):
    """An operation of the Agentic Commerce Protocol, on several paths."""
    settings.IDEMPOTENCY = {"PROFILE": "acp"}
    view = framework.view(lambda request, **route: work(request), idempotent("checkout"))
    serve(view, **{"sessions/<str:session>/": view})


@pytest.mark.usefixtures("checkout")
def test_6_1_the_scope_is_identity_and_path(alice, bob):
    paths = ["/", "/sessions/1/", "/sessions/2/", "/sessions/é/", f"/sessions/{'x' * 300}/"]
    for caller in (alice, bob):
        for url in paths:
            first, replay = (caller.post(url, key="k" * 255) for _ in range(2))
            assert (first.status_code, replay["Idempotent-Replayed"]) == (201, "true")
    assert effects() == 2 * len(paths)
    alice.post("/sessions/1/", key="order-71")
    assert IdempotencyRecord.objects.latest("pk").idempotency_key == "order-71 /sessions/1/"  # as the admin shows it


@pytest.mark.usefixtures("checkout")
@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (b'{"a": 1, "b": 2}', b'{"b": 2, "a": 1}', True),
        (b'{"a": 1.0}', b'{"a": 1}', True),
        (b'{"a": null}', b"{}", False),
        (b'{"a": [1, 2]}', b'{"a": [2, 1]}', False),
        (b'{"a": 1}', b'{"a": "1"}', False),
    ],
)
def test_6_2_only_the_json_of_bodies_is_compared(alice, first, second, same):
    alice.post(data=first, key="k", headers={"Request-Id": "1"})
    assert alice.post(data=second, key="k", headers={"Request-Id": "2"}).status_code == (201 if same else 422)


@pytest.mark.usefixtures("checkout")
def test_6_3_to_6_6_an_outcome_is_kept_for_a_day_and_a_5xx_runs_again(alice):
    for status in (200, 201, 405):
        first, replay = (alice.post(f"/?status={status}", key=f"k{status}") for _ in range(2))
        assert (replay.status_code, replay.content, replay["Idempotency-Key"]) == (status, first.content, f"k{status}")
        record = IdempotencyRecord.objects.latest("pk")
        assert record.expires_at - record.completed_at >= timedelta(hours=24)
    for query in ("?status=500", "?status=503", "?crash=1"):
        for _ in range(2):
            answer = alice.post(f"/{query}", key=query)
            assert answer.status_code >= 500
            assert "Idempotent-Replayed" not in answer
        assert IdempotencyRecord.objects.latest("pk").attempt == 2


def test_an_operation_may_have_a_profile_of_its_own(alice, serve, settings):
    settings.IDEMPOTENCY = {"PROFILE": "stripe"}
    own = {f"{name}/": idempotent(f"tests.{name}", profile=name)(plain_answer) for name in PROFILES}
    serve(idempotent("tests.default")(plain_answer), **own)
    for url, member in {"": "error", "stripe/": "error", "acp/": "message", "ietf/": "title"}.items():
        assert member in alice.post(f"/{url}").json()


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_answers_every_error(name, settings, rf):
    settings.IDEMPOTENCY = {"PROFILE": name}
    profile = PROFILES[name]
    assert profile.answers.keys() == ERRORS.keys()
    for code, error in ERRORS.items():
        response = response_for(error(retry_after=3), rf.post("/"))
        answer = profile.answers[code]
        assert (response.status_code, response["Content-Type"]) == (answer.status, profile.content_type)
        assert response["Retry-After"] == "3"
        assert f'"{answer.code}"' in response.content.decode()
        if name == "ietf":  # the documented statuses of the errors themselves
            assert (answer.status, answer.code) == (error.status_code, code)


def test_an_error_of_the_project_keeps_its_status_and_code(settings, rf):
    class TooManyKeysError(exceptions.RequestError):
        status_code = 429
        code = "shop_too_many_keys"

    settings.IDEMPOTENCY = {"PROFILE": "acp"}
    response = response_for(TooManyKeysError("Slow down."), rf.post("/"))
    assert response.status_code == 429
    told = {"type": "invalid_request", "code": "shop_too_many_keys", "message": "Slow down."}
    assert json.loads(response.content) == told


def test_a_setting_of_ones_own_comes_before_the_profile(alice, serve, settings):
    custom = lambda request, error: HttpResponse(error.code, status=418)  # noqa: E731
    settings.IDEMPOTENCY = {"PROFILE": "acp", "ERROR_RESPONSE": custom}
    serve(idempotent("tests.custom")(plain_answer))
    assert alice.post().content == b"idempotency_key_missing"


def test_the_status_of_a_key_needs_a_scope_without_a_path(rf):
    view = KeyStatusView.as_view(operation=Operation("tests.status", profile="acp"))
    with pytest.raises(ImproperlyConfigured, match="one key on two paths is two requests"):
        view(rf.get("/", headers={"Idempotency-Key": "k"}))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"profile": "acp"}, []),
        ({"profile": "acp", "ttl": timedelta(hours=23)}, ["idempotency.W020"]),
        ({"profile": "acp", "required": False}, ["idempotency.W021"]),
        ({"profile": "acp", "recordable": lambda status: True}, ["idempotency.W022"]),
        ({"profile": "acp", "in_progress": ACCEPTED}, ["idempotency.W023"]),
        ({"profile": "stripe", "required": False, "recordable": lambda status: True, "in_progress": ACCEPTED}, []),
        ({"ttl": timedelta(hours=2), "transaction": False, "recovery": PARK}, []),
    ],
)
def test_an_operation_that_breaks_a_rule_of_its_profile_is_reported(policy, expected):
    Operation("tests.rules", **policy)
    assert [message.id for message in check_profiles(None) if "tests.rules" in message.msg] == expected


# Idempotency-Status, on every response to a request with a key, and the page of a problem


HEADER = "Idempotency-Status"


def test_each_answer_of_a_protected_view_says_it(alice, framework):
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


def test_without_a_key_an_answer_says_nothing(alice, framework):
    framework.serve(required=False)
    assert HEADER not in alice.post()


def test_a_duplicate_that_gets_202_is_in_progress_and_a_job_until_it_ends(alice, serve):
    states = iter([202, 200])
    attached = {"in_progress": Attach(lambda scope: "/jobs/1/")}
    job = idempotent("tests.job", rebuild=lambda *_: HttpResponse(status=next(states)), **attached)
    accepted = idempotent("tests.accepted", in_progress=ACCEPTED)(plain_answer)
    serve(job(lambda request: HttpResponse(status=202)), **{"accepted/": accepted})
    assert [alice.post(key="k")[HEADER] for _ in range(3)] == ["executed", "in-progress", "replayed"]
    alice.post("/accepted/", key="k")
    claim_anew()
    duplicate = alice.post("/accepted/", key="k")
    assert (duplicate.status_code, duplicate[HEADER]) == (202, "in-progress")


def test_a_response_that_is_no_longer_kept_is_recorded(alice, serve):
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
def test_the_500_of_a_crash_has_the_headers_of_every_answer(alice, framework, transport, policy, status):
    alice.transport = transport
    framework.serve(work, **policy)
    crashed = alice.post("/?crash=1", key="k")
    assert crashed.status_code == 500
    assert (crashed[HEADER], crashed["Idempotency-Key"], crashed["Idempotency-Retention"]) == (status, "k", "259200")


@pytest.mark.usefixtures("middleware")
def test_a_crash_after_the_commit_was_an_execution(alice, serve):
    def fail():
        raise CrashError

    serve_answer(serve, lambda: transaction.on_commit(fail) or HttpResponse())
    crashed = alice.post(key="k")
    assert (crashed.status_code, crashed[HEADER]) == (500, "executed")
    assert alice.post(key="k")[HEADER] == "replayed"


class Mixed(PlainView):
    patch = idempotent("tests.mixed")(PlainView.post)


@pytest.mark.usefixtures("middleware")
def test_a_route_that_takes_no_key_ignores_it(alice, anonymous, serve, settings):
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
def test_a_view_that_claims_by_itself_may_say_it_itself(alice, serve):
    @serve
    def view(request):
        with claim("tests.block", account_id="a", key=request.headers["Idempotency-Key"], payload=None) as run:
            run.result = 1
        return JsonResponse({}, headers={HEADER: "replayed" if run.replayed else "executed"})

    assert [alice.post(key="k")[HEADER] for _ in range(2)] == ["executed", "replayed"]
    claim_anew()
    assert alice.post(key="k")[HEADER] == "in-progress"


def test_the_type_of_a_problem_leads_to_its_page(alice, framework, settings):
    framework.serve()
    assert alice.post().json()["type"] == "urn:idempotency:problem:key-missing"
    settings.IDEMPOTENCY = {"PROBLEM_DOCS": "https://docs.example.com/problems.html"}
    assert alice.post().json()["type"] == "https://docs.example.com/problems.html#key-missing"
