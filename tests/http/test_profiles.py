"""The profiles on the wire: each refusal and replay as its own source names it, by the setting and by the option."""

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


def ietf(status: int, code: str, body: Any) -> None:
    assert (body["status"], body["code"]) == (status, code)


def stripe(type_: str, code: str, body: Any) -> None:
    assert body["error"].pop("message")
    assert body == {"error": {"type": type_, "code": code}}


def acp(type_: str, code: str, body: Any) -> None:
    assert body.pop("message")
    assert body == {"type": type_, "code": code}


class TestStripe:
    @pytest.fixture(autouse=True)
    def _serve(self, framework: Framework, settings: Any) -> None:
        settings.IDEMPOTENCY = {"PROFILE": "stripe"}
        framework.serve()

    def test_a_replay_is_marked_as_stripe_marks_it(self, alice: Caller) -> None:
        first, replay = (alice.post(key="k") for _ in range(2))
        assert "Idempotent-Replayed" not in first
        assert replay["Idempotent-Replayed"] == "true"
        assert "Idempotency-Replayed" not in replay
        assert (replay.status_code, replay.content) == (first.status_code, first.content)
        assert effects() == 1

    def test_another_payload_is_an_idempotency_error_with_400(self, alice: Caller) -> None:
        alice.post(data={"amount": 1}, key="k")
        refused = alice.post(data={"amount": 2}, key="k")
        assert (refused.status_code, refused["Content-Type"]) == (400, "application/json")
        assert refused["Idempotency-Key"] == "k"
        stripe("idempotency_error", "idempotency_key_reused", refused.json())

    def test_a_key_in_use_is_a_conflict(self, alice: Caller) -> None:
        alice.post(key="k")
        claim_anew()
        refused = alice.post(key="k")
        assert refused.status_code == 409
        assert int(refused["Retry-After"]) >= 1
        stripe("idempotency_error", "idempotency_key_in_use", refused.json())

    def test_other_refusals_have_the_same_form(self, alice: Caller) -> None:
        stripe("invalid_request_error", "idempotency_key_missing", alice.post().json())
        stripe("invalid_request_error", "idempotency_key_invalid", alice.post(key="a,b").json())


class TestACP:
    """Agentic Commerce Protocol, ``rfcs/rfc.agentic_checkout.md``, section 6. Each test names its subsection."""

    @pytest.fixture(autouse=True)
    def _serve(self, framework: Framework, serve: Serve, settings: Any) -> None:
        settings.IDEMPOTENCY = {"PROFILE": "acp"}
        view = framework.view(lambda request, **route: work(request), idempotent("checkout"))
        serve(view, **{"sessions/<str:session>/": view})

    def test_6_1_a_request_without_a_key_is_refused(self, alice: Caller) -> None:
        refused = alice.post()
        assert (refused.status_code, refused["Content-Type"]) == (400, "application/json")
        acp("invalid_request", "idempotency_key_required", refused.json())
        assert effects() == 0

    def test_6_1_the_scope_is_identity_and_path(self, alice: Caller, bob: Caller) -> None:
        paths = ["/", "/sessions/1/", "/sessions/2/", "/sessions/é/", f"/sessions/{'x' * 300}/"]
        for caller in (alice, bob):
            for path in paths:
                first, replay = (caller.post(path, key="k" * 255) for _ in range(2))
                assert first.status_code == 201
                assert replay["Idempotent-Replayed"] == "true"
        assert effects() == 2 * len(paths)

    def test_6_1_the_record_shows_key_and_path(self, alice: Caller) -> None:
        alice.post("/sessions/1/", key="order-71")
        assert IdempotencyRecord.objects.get().idempotency_key == "order-71 /sessions/1/"

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
    def test_6_2_bodies_are_compared_by_their_json(
        self, alice: Caller, first: bytes, second: bytes, same: bool
    ) -> None:
        alice.post(data=first, key="k")
        answer = alice.post(data=second, key="k")
        assert (answer.status_code == 201) == same
        if not same:
            assert answer.status_code == 422
            acp("invalid_request", "idempotency_conflict", answer.json())

    def test_6_2_headers_do_not_count(self, alice: Caller) -> None:
        for request_id in ("1", "2"):
            answer = alice.post(key="k", headers={"Request-Id": request_id})
        assert answer["Idempotent-Replayed"] == "true"

    def test_6_3_a_replay_has_the_status_and_the_bytes_of_the_first_answer(self, alice: Caller) -> None:
        for status in (200, 201, 405):
            first, replay = (alice.post(f"/?status={status}", key=f"k{status}") for _ in range(2))
            assert (replay.status_code, replay.content) == (status, first.content)
            assert replay["Idempotency-Key"] == f"k{status}"

    def test_6_4_a_request_in_flight_is_a_conflict_with_retry_after(self, alice: Caller) -> None:
        alice.post(key="k")
        claim_anew()
        refused = alice.post(key="k")
        assert refused.status_code == 409
        assert int(refused["Retry-After"]) >= 1
        acp("invalid_request", "idempotency_in_flight", refused.json())

    @pytest.mark.parametrize("query", ["?status=500", "?status=503", "?crash=1"])
    def test_6_5_a_retry_after_a_5xx_runs_again(self, alice: Caller, query: str) -> None:
        for _ in range(2):
            answer = alice.post(f"/{query}", key="k")
            assert answer.status_code >= 500
            assert "Idempotent-Replayed" not in answer
        assert IdempotencyRecord.objects.get().attempt == 2

    def test_6_6_an_outcome_is_kept_for_a_day_or_longer(self, alice: Caller) -> None:
        alice.post(key="k")
        record = IdempotencyRecord.objects.get()
        assert record.expires_at - record.completed_at >= timedelta(hours=24)


def test_an_operation_may_have_a_profile_of_its_own(alice: Caller, serve: Serve, settings: Any) -> None:
    settings.IDEMPOTENCY = {"PROFILE": "stripe"}
    own = {name: idempotent(f"tests.{name}", profile=name)(plain_answer) for name in PROFILES}
    serve(idempotent("tests.default")(plain_answer), **{f"{name}/": view for name, view in own.items()})
    stripe("invalid_request_error", "idempotency_key_missing", alice.post().json())
    stripe("invalid_request_error", "idempotency_key_missing", alice.post("/stripe/").json())
    acp("invalid_request", "idempotency_key_required", alice.post("/acp/").json())
    ietf(400, "idempotency_key_missing", alice.post("/ietf/").json())


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
    body = {"type": "invalid_request", "code": "shop_too_many_keys", "message": "Slow down."}
    assert json.loads(response.content) == body


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
