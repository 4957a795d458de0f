"""The profiles on the wire: each refusal and replay as its own source names it, by the setting and by the option.

The rules of the Agentic Commerce Protocol are those of ``rfcs/rfc.agentic_checkout.md``, section 6.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse

from idempotency import ACCEPTED, PARK, Operation, exceptions, idempotent
from idempotency.http.checks import check_profiles
from idempotency.http.key_status import KeyStatusView
from idempotency.http.problems import PROFILES, response_for
from idempotency.models import IdempotencyRecord
from tests.http.callers import Caller, claim_anew, effects
from tests.http.serving import Framework, Serve
from tests.http.views import plain_answer, work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]

ERRORS = {
    error.code: error
    for error in vars(exceptions).values()
    if isinstance(error, type) and issubclass(error, exceptions.IdempotencyError) and error.title != "Idempotency error"
}


def stripe(type_: str, code: str) -> Any:
    return {"error": {"type": type_, "code": code}}


def acp(code: str) -> Any:
    return {"type": "invalid_request", "code": code}


#: The status and the body of each answer, without its message for people.
ANSWERS: dict[str, dict[str, tuple[int, Any]]] = {
    "stripe": {
        "missing": (400, stripe("invalid_request_error", "idempotency_key_missing")),
        "invalid": (400, stripe("invalid_request_error", "idempotency_key_invalid")),
        "reused": (400, stripe("idempotency_error", "idempotency_key_reused")),
        "running": (409, stripe("idempotency_error", "idempotency_key_in_use")),
    },
    "acp": {  # 6.1, 6.2 and 6.4
        "missing": (400, acp("idempotency_key_required")),
        "invalid": (400, acp("idempotency_key_invalid")),
        "reused": (422, acp("idempotency_conflict")),
        "running": (409, acp("idempotency_in_flight")),
    },
}


@pytest.mark.parametrize("profile", ANSWERS)
def test_a_replay_and_each_refusal_are_told_as_the_source_tells_them(
    alice: Caller, framework: Framework, settings: Any, profile: str
) -> None:
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
        assert answer["Content-Type"] == "application/json"
        assert body.get("error", body).pop("message")
        assert (answer.status_code, body) == ANSWERS[profile][case]
    assert effects() == 1


@pytest.fixture
def checkout(framework: Framework, serve: Serve, settings: Any) -> None:
    """An operation of the Agentic Commerce Protocol, on several paths."""
    settings.IDEMPOTENCY = {"PROFILE": "acp"}
    view = framework.view(lambda request, **route: work(request), idempotent("checkout"))
    serve(view, **{"sessions/<str:session>/": view})


@pytest.mark.usefixtures("checkout")
def test_6_1_the_scope_is_identity_and_path(alice: Caller, bob: Caller) -> None:
    paths = ["/", "/sessions/1/", "/sessions/2/", "/sessions/é/", f"/sessions/{'x' * 300}/"]
    for caller in (alice, bob):
        for path in paths:
            first, replay = (caller.post(path, key="k" * 255) for _ in range(2))
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
def test_6_2_bodies_are_compared_by_their_json_and_headers_do_not_count(
    alice: Caller, first: bytes, second: bytes, same: bool
) -> None:
    alice.post(data=first, key="k", headers={"Request-Id": "1"})
    assert alice.post(data=second, key="k", headers={"Request-Id": "2"}).status_code == (201 if same else 422)


@pytest.mark.usefixtures("checkout")
def test_6_3_to_6_6_an_outcome_is_kept_for_a_day_and_a_5xx_runs_again(alice: Caller) -> None:
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


def test_an_operation_may_have_a_profile_of_its_own(alice: Caller, serve: Serve, settings: Any) -> None:
    settings.IDEMPOTENCY = {"PROFILE": "stripe"}
    own = {f"{name}/": idempotent(f"tests.{name}", profile=name)(plain_answer) for name in PROFILES}
    serve(idempotent("tests.default")(plain_answer), **own)
    for url, member in {"": "error", "stripe/": "error", "acp/": "message", "ietf/": "title"}.items():
        assert member in alice.post(f"/{url}").json()


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_answers_every_error(name: str, settings: Any, rf: Any) -> None:
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


def test_an_error_of_the_project_keeps_its_status_and_code(settings: Any, rf: Any) -> None:
    class TooManyKeysError(exceptions.RequestError):
        status_code = 429
        code = "shop_too_many_keys"

    settings.IDEMPOTENCY = {"PROFILE": "acp"}
    response = response_for(TooManyKeysError("Slow down."), rf.post("/"))
    assert response.status_code == 429
    assert json.loads(response.content) == {**acp("shop_too_many_keys"), "message": "Slow down."}


def test_a_setting_of_ones_own_comes_before_the_profile(alice: Caller, serve: Serve, settings: Any) -> None:
    custom = lambda request, error: HttpResponse(error.code, status=418)  # noqa: E731
    settings.IDEMPOTENCY = {"PROFILE": "acp", "ERROR_RESPONSE": custom}
    serve(idempotent("tests.custom")(plain_answer))
    assert alice.post().content == b"idempotency_key_missing"


def test_the_status_of_a_key_needs_a_scope_without_a_path(rf: Any) -> None:
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
def test_an_operation_that_breaks_a_rule_of_its_profile_is_reported(policy: Any, expected: list[str]) -> None:
    Operation("tests.rules", **policy)
    assert [message.id for message in check_profiles(None) if "tests.rules" in message.msg] == expected
