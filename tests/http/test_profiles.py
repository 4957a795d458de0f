"""The ``Idempotency-Status`` header, and the names that each profile takes from its source."""

import functools
import json
from datetime import timedelta

import pytest
from django.db import transaction
from django.http import HttpResponse
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from idempotency import ACCEPTED, PARK, REEXECUTE, Operation, exceptions, idempotent
from idempotency.http.problems import PROFILES, response_for
from idempotency.models import IdempotencyRecord
from idempotency.views.checks import check_profiles
from tests.http.callers import effects, refusals
from tests.http.serving import OUTSIDE, drf_view, serve_answer
from tests.http.test_checks_of_urls import Replaced, Table
from tests.http.views import CrashError, PlainView, drf_answer, plain_answer, work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]

ERRORS = {
    error.code: error
    for error in vars(exceptions).values()
    if isinstance(error, type) and issubclass(error, exceptions.IdempotencyError) and error.title != "Idempotency error"
}


#: The status of each answer, and its body without the human-readable message.
ANSWERS = {
    "stripe": {
        "idempotency_key_missing": (400, "invalid_request_error", "idempotency_key_missing"),
        "idempotency_key_invalid": (400, "invalid_request_error", "idempotency_key_invalid"),
        "idempotency_key_reused": (400, "idempotency_error", "idempotency_key_reused"),
        "idempotency_in_progress": (409, "idempotency_error", "idempotency_key_in_use"),
    },
    "acp": {  # 6.1, 6.2 and 6.4
        "idempotency_key_missing": (400, "invalid_request", "idempotency_key_required"),
        "idempotency_key_invalid": (400, "invalid_request", "idempotency_key_invalid"),
        "idempotency_key_reused": (422, "invalid_request", "idempotency_conflict"),
        "idempotency_in_progress": (409, "invalid_request", "idempotency_in_flight"),
    },
}


@pytest.mark.parametrize("name", PROFILES)
def test_a_handlers_own_mark_of_a_replay_reaches_no_client(alice, serve, settings, name):
    """For example, the handler may forward another server's response."""
    mark = PROFILES[name].replayed
    settings.IDEMPOTENCY = {"PROFILE": name, "RECORDED_HEADERS": [mark]}
    serve_answer(serve, lambda: HttpResponse(status=201, headers={mark: "true"}))
    first, replay = (alice.post(key="k") for _ in range(2))
    assert (mark in first, replay[mark]) == (False, "true")


@pytest.mark.parametrize("profile", ANSWERS)
def test_a_profile_matches_its_source(alice, framework, settings, profile):
    settings.IDEMPOTENCY = {"PROFILE": profile}
    framework.serve()
    first, replay = (alice.post(data={"amount": 1}, key="k") for _ in range(2))
    assert "Idempotent-Replayed" not in first
    assert (replay["Idempotent-Replayed"], "Idempotency-Replayed" in replay) == ("true", False)
    assert (replay.status_code, replay.content) == (first.status_code, first.content)
    for code, answer in refusals(alice).items():
        body = answer.json()
        status, type_, code_of_profile = ANSWERS[profile][code]
        assert (answer.status_code, answer["Content-Type"]) == (status, "application/json")
        expected = {"type": type_, "code": code_of_profile}
        assert body.get("error", body).pop("message")
        assert body == ({"error": expected} if profile == "stripe" else expected)
    assert effects() == 1


@pytest.mark.failure_112
@pytest.mark.parametrize(("before", "after"), [("ietf", "stripe"), ("stripe", "acp"), ("acp", "ietf")])
def test_a_change_of_profile_changes_no_identity(alice, framework, serve, settings, before, after):
    """Retries of a request from before the deploy replay it, and its payload stays bound to its key."""
    view = framework.view(lambda request, **route: work(request), idempotent("checkout"))
    serve(view, **{"sessions/<str:session>/": view})
    settings.IDEMPOTENCY = {"PROFILE": before}
    first = alice.post("/sessions/1/", data={"amount": 1}, key="k")
    settings.IDEMPOTENCY = {"PROFILE": after}
    retry = alice.post("/sessions/1/", data={"amount": 1}, key="k")
    assert (retry[PROFILES[after].replayed], retry.content) == ("true", first.content)
    for url, data in (("/sessions/2/", {"amount": 1}), ("/sessions/1/", {"amount": 2})):
        assert alice.post(url, data=data, key="k")["Idempotency-Status"] == "reused"
    assert effects() == 1
    assert IdempotencyRecord.objects.get().idempotency_key == "k"


def test_an_operation_may_have_a_separate_profile(alice, serve, settings):
    settings.IDEMPOTENCY = {"PROFILE": "stripe"}
    own = {f"{name}/": idempotent(f"tests.{name}", profile=name)(plain_answer) for name in PROFILES}
    serve(idempotent("tests.default")(plain_answer), **own)
    for url, member in {"": "error", "stripe/": "error", "acp/": "message", "ietf/": "title"}.items():
        assert member in alice.post(f"/{url}").json()


MISTAKES = {f"idempotency_{name}" for name in ("key_missing", "key_invalid", "payload_invalid", "account_required")}


def category(profile, status, code):
    if profile == "stripe":
        return "api_error" if status >= 500 else "invalid_request_error" if code in MISTAKES else "idempotency_error"
    return {500: "processing_error", 503: "service_unavailable"}.get(status, "invalid_request")


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
        if code not in ANSWERS.get(name, {}):  # the error's own documented status
            assert (answer.status, answer.code) == (error.status_code, code)
        if name != "ietf":
            assert answer.type == category(name, answer.status, code)


@pytest.mark.parametrize(("profile", "category"), [("stripe", "invalid_request_error"), ("acp", "invalid_request")])
def test_an_error_of_the_project_keeps_its_status_and_code(settings, rf, profile, category):
    class TooManyKeysError(exceptions.RequestError):
        status_code = 429
        code = "shop_too_many_keys"

    settings.IDEMPOTENCY = {"PROFILE": profile}
    response = response_for(TooManyKeysError("Slow down."), rf.post("/"))
    assert response.status_code == 429
    body = json.loads(response.content)
    assert body.get("error", body) == {"type": category, "code": "shop_too_many_keys", "message": "Slow down."}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"profile": "acp", "retention": timedelta(hours=24)}, []),
        ({"profile": "acp", "retention": timedelta(hours=23)}, ["keeps its outcomes for 23:00:00"]),
        ({"profile": "acp", "key_required": False}, ["lets a request without a key run"]),
        ({"profile": "acp", "recordable": lambda status: status == 500}, ["records responses with a status of 5xx"]),
        ({"profile": "acp", "in_progress": ACCEPTED}, ["answers a duplicate of a running request with 202"]),
        ({"profile": "stripe", "key_required": False, "recordable": lambda status: True, "in_progress": ACCEPTED}, []),
        ({"retention": timedelta(hours=2), "transaction": False, "recovery": PARK}, []),
    ],
)
def test_an_operation_that_breaks_a_rule_of_its_profile_is_reported(policy, expected):
    Operation.declare("tests.rules", **policy)
    found = [message for message in check_profiles(None) if "tests.rules" in message.msg]
    subject = f"Operation 'tests.rules' of profile {policy.get('profile')!r}"
    assert [message.msg for message in found] == [f"{subject} {problem}." for problem in expected]
    assert {(message.id, bool(message.hint)) for message in found} <= {("idempotency.W020", True)}


def test_rules_of_profiles_wait_for_valid_settings(settings):
    Operation.declare("tests.rules", profile="acp", key_required=False)
    settings.IDEMPOTENCY = {"RETENTION": 3}
    assert check_profiles(None) == []


HEADER = "Idempotency-Status"


@pytest.mark.failure_88
@pytest.mark.usefixtures("middleware")
def test_a_refusal_before_the_lookup_reports_an_unknown_key(alice, anonymous, framework):
    framework.serve(key_required=True)
    alice.post(key="k")
    answers = [alice.post(data=b'{"a": 1e999}', key="k"), alice.post(key="a,b"), anonymous.post(key="k")]
    if framework.name == "drf":
        answers.append(alice.post(data=b"{oops", key="k"))  # refused by DRF itself
        assert (answers[-1].status_code, answers[-1]["Idempotency-Key"]) == (400, "k")
    assert [answer[HEADER] for answer in answers] == ["unknown"] * len(answers)
    assert [answer[HEADER] for answer in (alice.post("/?status=503", key="new"), alice.post())] == ["not-recorded"] * 2


@pytest.mark.usefixtures("middleware")
@pytest.mark.parametrize(
    ("policy", "status"),
    [({}, "not-recorded"), ({"transaction": False, "recovery": REEXECUTE}, "not-recorded"), (OUTSIDE, "unknown")],
    ids=["in a transaction", "outside, runs again", "outside, parked"],
)
def test_the_500_of_a_crash_has_the_headers_of_every_answer(alice, framework, transport, policy, status):
    framework.serve(work, **policy)
    crashed = alice.post("/?crash=1", key="k")
    assert crashed.status_code == 500
    assert (crashed[HEADER], crashed["Idempotency-Key"], crashed["Idempotency-Retention"]) == (status, "k", "259200")


#: The reported status of a key after each error. After any other error it is "unknown".
KNOWN = {
    "idempotency_key_missing": "not-recorded",
    "idempotency_key_expired": "not-recorded",
    "idempotency_in_progress": "in-progress",
    "idempotency_key_reused": "reused",
    "idempotency_body_gone": "recorded",
    "idempotency_outcome_unreadable": "recorded",
}


@pytest.mark.usefixtures("middleware")
@pytest.mark.parametrize("code", ERRORS)
def test_an_error_has_the_status_of_the_key(alice, serve, code):
    @serve
    def view(request):
        raise ERRORS[code]

    assert alice.post(key="k")[HEADER] == KNOWN.get(code, "unknown")


@pytest.mark.usefixtures("middleware")
def test_a_crash_after_the_commit_is_reported_as_executed(alice, serve):
    def fail():
        raise CrashError

    serve_answer(serve, lambda: transaction.on_commit(fail) or HttpResponse())
    crashed = alice.post(key="k")
    assert (crashed.status_code, crashed[HEADER]) == (500, "executed")
    assert alice.post(key="k")[HEADER] == "replayed"


class Mixed(PlainView):
    patch = idempotent("tests.mixed")(PlainView.post)


@pytest.mark.usefixtures("middleware")
def test_a_route_that_takes_no_key_ignores_it(alice, anonymous, serve):
    protected = idempotent("tests.protected")(plain_answer)
    serve(plain_answer, **{"mixed/": Mixed.as_view(), "protected/": protected})
    assert alice.post(key="k")[HEADER] == "ignored"
    assert HEADER not in alice.post()
    assert alice.post("/mixed/", key="k")[HEADER] == "ignored"
    assert alice.request("PATCH", "/mixed/", key="k")[HEADER] == "executed"
    assert alice.request("PUT", "/protected/", key="k")[HEADER] == "ignored"
    assert HEADER not in alice.post("/nowhere/", key="k")


@pytest.mark.failure_88
@pytest.mark.usefixtures("middleware")
@pytest.mark.parametrize("view", [Table, Replaced])
def test_a_success_without_the_protected_handler_is_logged_once(alice, serve, caplog, view):
    serve(**{f"{view.__name__}/": view.as_view()})
    url = f"/{view.__name__}/"
    assert [alice.post(url, key="k")[HEADER] for _ in range(2)] == ["ignored", "ignored"]
    assert (
        len([text for text in caplog.messages if f"Route '{view.__name__}/' is declared under operation" in text]) == 1
    )
    assert alice.post(f"{url}?status=402", key="k")[HEADER] == "unknown"
    assert HEADER not in alice.post(url)


@pytest.mark.failure_88
@pytest.mark.usefixtures("middleware")
@pytest.mark.parametrize("status", [302, 403, 503])
def test_a_refusal_above_the_handler_has_not_looked_up_the_key(alice, serve, status):
    def refusing(view):
        def refuse(request):
            return HttpResponse(status=status) if "refuse" in request.GET else view(request)

        return csrf_exempt(functools.wraps(view)(refuse))

    protected = idempotent("tests.protected")(plain_answer)
    serve(refusing(protected), **{"mixed/": refusing(Mixed.as_view())})
    assert alice.post(key="k")[HEADER] == "executed"
    assert alice.post("/?refuse=1", key="k")[HEADER] == "unknown"
    assert alice.request("PATCH", "/mixed/?refuse=1", key="k")[HEADER] == "unknown"
    assert alice.post("/mixed/?refuse=1", key="k")[HEADER] == "ignored"


@pytest.mark.usefixtures("middleware")
def test_a_wrong_method_or_url_has_no_status_and_claims_nothing(alice, serve):
    function = require_POST(idempotent("tests.function")(plain_answer))
    only_post = type("OnlyPost", (View,), {"post": lambda self, request: plain_answer(request)})
    around = idempotent("tests.around")(only_post.as_view())
    serve(
        function,
        **{"mixed/": Mixed.as_view(), "drf/": drf_view(idempotent("tests.drf")(drf_answer)), "around/": around},
    )
    wrong = [
        ("PATCH", "/"),
        ("PATCH", "/around/"),
        *((method, url) for method in ("PUT", "BREW") for url in ("/", "/mixed/", "/drf/")),
    ]
    answers = [alice.request(method, url, key="k") for method, url in [*wrong, ("POST", "/nowhere/")]]
    assert [answer.status_code for answer in answers] == [405] * len(wrong) + [404]
    assert not any(HEADER in answer for answer in answers)
    assert not IdempotencyRecord.objects.exists()
