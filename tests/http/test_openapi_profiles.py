"""The OpenAPI schema of each profile, as drf-spectacular and Django Ninja make it: what it names is what is sent."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import jsonschema
import pytest
from django.http import HttpRequest
from django.urls import path
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.utils import extend_schema
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency import idempotent
from idempotency.contrib.spectacular import AutoSchema
from tests.http.callers import Caller, claim_anew
from tests.http.views import LabelSerializer

ninja = pytest.importorskip("ninja", reason="Django Ninja is not installed")

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]

#: The codes of each profile by status, the content type of its problems, the mark of a replay, and their component.
PROFILES: dict[str, tuple[dict[str, set[str]], str, str, str]] = {
    "ietf": (
        {
            "400": {
                "idempotency_key_missing",
                "idempotency_key_invalid",
                "idempotency_key_expired",
                "idempotency_payload_invalid",
            },
            "401": {"idempotency_account_required"},
            "409": {
                "idempotency_in_progress",
                "idempotency_outcome_unknown",
                "idempotency_body_gone",
            },
            "422": {"idempotency_key_reused"},
            "503": {"idempotency_unavailable"},
        },
        "application/problem+json",
        "Idempotency-Replayed",
        "IdempotencyProblem",
    ),
    "stripe": (
        {
            "400": {
                "idempotency_key_missing",
                "idempotency_key_invalid",
                "idempotency_key_expired",
                "idempotency_payload_invalid",
                "idempotency_key_reused",
            },
            "401": {"idempotency_account_required"},
            "409": {
                "idempotency_key_in_use",
                "idempotency_outcome_unknown",
                "idempotency_body_gone",
            },
            "503": {"idempotency_unavailable"},
        },
        "application/json",
        "Idempotent-Replayed",
        "IdempotencyErrorObject",
    ),
    "acp": (
        {
            "400": {
                "idempotency_key_required",
                "idempotency_key_invalid",
                "idempotency_key_expired",
                "idempotency_payload_invalid",
            },
            "401": {"idempotency_account_required"},
            "409": {
                "idempotency_in_flight",
                "idempotency_outcome_unknown",
                "idempotency_body_gone",
            },
            "422": {"idempotency_conflict"},
            "503": {"idempotency_unavailable"},
        },
        "application/json",
        "Idempotent-Replayed",
        "IdempotencyError",
    ),
}


class Label(ninja.Schema):
    label: str


POLICY: dict[str, Any] = {"max_key_age": timedelta(days=1), "body_ttl": timedelta(hours=1)}

#: The URL patterns of a route, and the function that makes its schema.
Served = tuple[tuple[Any, ...], Callable[[], dict[str, Any]]]


def by_spectacular(policy: Any) -> Served:
    class Documented(APIView):
        schema = AutoSchema()

        @extend_schema(request=LabelSerializer, responses={201: LabelSerializer})
        @idempotent("tests.described_by_profile", **policy)
        def post(self, request: Any) -> Response:
            return Response({"label": "made"}, status=201)

    patterns = (path("", Documented.as_view()),)
    return patterns, lambda: SchemaGenerator(patterns=patterns).get_schema(request=None, public=True)  # type: ignore[no-any-return]


def by_ninja(policy: Any) -> Served:
    def authenticate(request: HttpRequest) -> str:
        return request.headers["Authorization"]

    api = ninja.NinjaAPI(auth=authenticate, urls_namespace="tests-profiles")

    @api.post("/", response={201: Label})
    @idempotent("tests.described_by_profile", account=lambda request: "alice", **policy)
    def create(request: HttpRequest, label: Label) -> Any:
        return {"label": "made"}

    return (path("", api.urls),), lambda: json.loads(json.dumps(api.get_openapi_schema(path_prefix="")))


@pytest.fixture(params=[by_spectacular, by_ninja])
def make(request: Any) -> Callable[[Any], Served]:
    made: Callable[[Any], Served] = request.param
    return made


@pytest.fixture(params=PROFILES)
def profile(request: Any) -> str:
    name: str = request.param
    return name


def operation_of(document: dict[str, Any]) -> dict[str, Any]:
    """The one operation of a schema, with its references to problems resolved."""
    operation: dict[str, Any] = document["paths"]["/"]["post"]
    for response in operation["responses"].values():
        for content in response.get("content", {}).values():
            name = content["schema"].get("$ref", "").removeprefix("#/components/schemas/")
            if name.startswith("Idempotency"):
                content["schema"] = {"title": name, **document["components"]["schemas"][name]}
    return operation


@pytest.mark.parametrize("chosen_by", ["the setting", "the operation"])
def test_the_names_and_statuses_of_the_profile_are_described(
    make: Callable[[Any], Served], profile: str, chosen_by: str, settings: Any
) -> None:
    codes, content_type, marker, component = PROFILES[profile]
    settings.IDEMPOTENCY = {"PROFILE": profile} if chosen_by == "the setting" else {"PROFILE": "ietf"}
    operation = operation_of(make(POLICY if chosen_by == "the setting" else {**POLICY, "profile": profile})[1]())
    answers = {status: answer for status, answer in operation["responses"].items() if status != "201"}
    assert {status: set(re.findall(r"`(\w+)`", answer["description"])) for status, answer in answers.items()} == codes
    assert {(*answer["content"],) for answer in answers.values()} == {(content_type,)}
    assert {answer["content"][content_type]["schema"]["title"] for answer in answers.values()} == {component}
    marked = [name for name in operation["responses"]["201"]["headers"] if name.endswith("Replayed")]
    assert marked == [marker]


def test_answers_are_as_they_are_described(
    make: Callable[[Any], Served], profile: str, settings: Any, alice: Caller
) -> None:
    codes, content_type, marker, _ = PROFILES[profile]
    settings.IDEMPOTENCY = {"PROFILE": profile}
    settings.ROOT_URLCONF, document = make(POLICY)
    responses = operation_of(document())["responses"]
    first, replay = (alice.post(data={"label": "one"}, key="k") for _ in range(2))
    assert (first.status_code, marker in first, replay[marker]) == (201, False, "true")
    for answer in (first, replay):
        for name, header in responses["201"]["headers"].items():
            if name != "Idempotency-Retention" and name in answer:
                jsonschema.validate(answer[name], header["schema"])
    refused = [alice.post(data={"label": "two"}, key="k")]
    refused += [alice.post(data={"label": "one"}, key=key) for key in (None, "a,b")]
    claim_anew()
    refused.append(alice.post(data={"label": "one"}, key="k"))
    sent = set()
    for answer in refused:
        assert answer["Content-Type"] == content_type
        body = answer.json()
        jsonschema.validate(body, responses[str(answer.status_code)]["content"][content_type]["schema"])
        code = body.get("error", body)["code"]
        assert code in codes[str(answer.status_code)]
        sent.add(code)
    assert len(sent) == len(refused)


def test_a_status_that_may_be_an_outcome_or_a_refusal_says_both_of_the_key(settings: Any, alice: Caller) -> None:
    class Documented(APIView):
        schema = AutoSchema()

        @extend_schema(request=LabelSerializer, responses={201: LabelSerializer, 422: LabelSerializer})
        @idempotent("tests.described_outcome")
        def post(self, request: Any) -> Response:
            return Response({"label": "made"}, status=201)

    settings.ROOT_URLCONF = patterns = (path("", Documented.as_view()),)
    document = SchemaGenerator(patterns=patterns).get_schema(request=None, public=True)
    described = document["paths"]["/"]["post"]["responses"]["422"]["headers"]["Idempotency-Status"]
    alice.post(data={"label": "one"}, key="k")
    refused = alice.post(data={"label": "two"}, key="k")
    assert (refused.status_code, refused["Idempotency-Status"]) == (422, "reused")
    jsonschema.validate(refused["Idempotency-Status"], described["schema"])
