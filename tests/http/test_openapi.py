"""The OpenAPI schema of protected operations for each profile, from drf-spectacular and from Django Ninja."""

import json
import re
from collections import defaultdict
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml
from django.core.management import call_command
from django.http import HttpRequest
from django.urls import path
from drf_spectacular import openapi
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from drf_spectacular.validation import validate_schema
from rest_framework import viewsets
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency import ACCEPTED, Attach, idempotent
from idempotency.contrib.openapi import KEY_SCHEMA
from idempotency.contrib.rest_framework import IdempotentMixin, KeyStatusView
from idempotency.contrib.spectacular import AutoSchema
from idempotency.exceptions import KeyInvalidError
from idempotency.http.key_sources import FromForm
from idempotency.http.key_status import KeyStatusView as PlainKeyStatusView
from idempotency.http.problems import PROFILES
from idempotency.identity.keys import parse_header
from tests.http.callers import refusals
from tests.http.views import LabelSerializer

OURS = {"400", "401", "409", "422", "503"}


def described(handler, *, schema=AutoSchema, **members):
    view = type("Documented", (APIView,), {"post": handler, "schema": schema(), **members})
    document = SchemaGenerator(patterns=[path("", view.as_view())]).get_schema(request=None, public=True)
    validate_schema(document)
    return document["paths"]["/"]["post"]


def handler(name="tests.described", **policy):
    @extend_schema(request=None, responses={201: LabelSerializer, 418: None, 503: None})
    @idempotent(name, **policy)
    def post(self, request):
        return Response(status=201)

    return post


def header_of(operation):
    return [parameter for parameter in operation.get("parameters", []) if parameter["in"] == "header"]


def test_the_sample_projects_schema_describes_protected_operations_only(tmp_path):
    file = tmp_path / "schema.yaml"
    call_command("spectacular", file=str(file), validate=True, fail_on_warn=True)
    document = yaml.safe_load(file.read_text())
    protected = {
        f"{method} {route}"
        for route, operations in document["paths"].items()
        for method, operation in operations.items()
        if header_of(operation) and set(operation["responses"]) >= OURS
    }
    assert protected == {"post /charges/", "post /orders/"}  # but not their GET
    assert [name for name in document["components"]["schemas"] if "Problem" in name] == ["IdempotencyProblem"]
    assert "409" not in document["paths"]["/unprotected/orders/"]["post"]["responses"]


def key_status_views(schema=AutoSchema):
    view = type("KeyStatusView", (KeyStatusView,), {"schema": schema()}).as_view
    return [
        path("keys/", view()),
        path("keys/<str:operation>/", view()),
        path("charges/key/", view(operation="charges.create")),
        path("plain/<str:operation>/", PlainKeyStatusView.as_view()),
    ]


@pytest.mark.once
@pytest.mark.parametrize("schema", [AutoSchema, openapi.AutoSchema], ids=["ours", "theirs"])
def test_the_key_status_views_are_described_without_a_warning(tmp_path, settings, schema):
    from testproject.urls import urlpatterns

    views = key_status_views(schema)
    settings.ROOT_URLCONF = ModuleType("urls")
    # Their schema gives two of the routes one operation id, and warns.
    settings.ROOT_URLCONF.urlpatterns = [*urlpatterns, *(views if schema is AutoSchema else views[1:])]
    file = tmp_path / "schema.yaml"
    call_command("spectacular", file=str(file), validate=True, fail_on_warn=True)
    document = yaml.safe_load(file.read_text())
    schemas = {
        route: described["get"]["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for route, described in document["paths"].items()
        if "key" in route
    }
    one = {"/keys/{operation}/": "KeyStatus", "/charges/key/": "KeyStatus"}
    assert schemas == one | ({"/keys/": "KeyStatusList"} if schema is AutoSchema else {})
    for route in schemas if schema is AutoSchema else ():
        (header,) = header_of(document["paths"][route]["get"])
        assert (header["name"], header["required"]) == ("Idempotency-Key", True)


@pytest.mark.once
@pytest.mark.django_db(transaction=True)
def test_the_responses_of_the_key_status_views_match_the_schema(settings, alice):
    settings.ROOT_URLCONF, _ = by_spectacular({})
    settings.ROOT_URLCONF = (*settings.ROOT_URLCONF, *key_status_views())
    alice.post(data={"label": "made"}, key="k")
    document = SchemaGenerator(patterns=key_status_views()).get_schema(request=None, public=True)
    document = json.loads(json.dumps(document))
    for url, route in {"/keys/": "/keys/", "/keys/tests.described_by_profile/": "/keys/{operation}/"}.items():
        schema = document["paths"][route]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        body = alice.get(url, key="k").json()
        assert "completed" in str(body)
        jsonschema.validate(body, {**schema, "components": document["components"]})


def accepts(value):
    try:
        parse_header(value)
    except KeyInvalidError:
        return False
    return True


def test_the_headers_pattern_accepts_the_keys_that_the_parser_accepts():
    values = ["", "k", '"k"', "k" * 255, "k" * 256, f'"{"k" * 255}"', f'"{"k" * 256}"', '"a\\b"']
    values.append('"' + '\\"' * 255 + '"')
    values += [text.format(chr(code)) for code in range(0x1F, 0x82) for text in ("a{}b", '"a{}b"')]
    described = {
        value
        for value in values
        if re.search(KEY_SCHEMA["pattern"], value) and KEY_SCHEMA["minLength"] <= len(value) <= KEY_SCHEMA["maxLength"]
    }
    assert described == set(filter(accepts, values))


def test_an_operation_is_described_by_its_policy():
    strict, lenient = described(handler()), described(handler(name="tests.lenient", key_required=False))
    assert [header["required"] for header in header_of(strict)] == [True]
    assert "required" not in header_of(lenient)[0]
    bounds = {"max_key_age": timedelta(days=1), "body_retention": timedelta(hours=1)}
    elsewhere = described(handler(name="tests.elsewhere", key=FromForm(), **bounds))
    assert "required" not in header_of(elsewhere)[0]
    for status, code in (("400", "idempotency_key_expired"), ("409", "idempotency_body_gone")):
        named = [code in answers["responses"][status]["description"] for answers in (strict, elsewhere)]
        assert named == [False, True]
    assert "idempotency_key_missing" in strict["responses"]["400"]["description"]
    assert "idempotency_key_missing" not in lenient["responses"]["400"]["description"]
    assert "Retry-After" in strict["responses"]["409"]["headers"]
    assert "202" not in strict["responses"]
    marked = {
        status for status, answer in strict["responses"].items() if "Idempotency-Replayed" in answer.get("headers", {})
    }
    assert marked == {"201", "418"}  # the recorded ones


@pytest.mark.parametrize(
    ("policy", "headers"),
    [
        ({"in_progress": ACCEPTED}, {"Retry-After"}),
        ({"in_progress": Attach(lambda scope: "/jobs/"), "rebuild": lambda *_: None}, {"Retry-After", "Location"}),
    ],
    ids=["accepted", "attached"],
)
def test_the_202_for_a_duplicate_is_described(policy, headers):
    assert described(handler(**policy))["responses"]["202"]["headers"].keys() >= headers


def test_a_projects_own_description_wins():
    own = OpenApiResponse({"type": "string"}, description="Ours.")

    @extend_schema(
        request=None,
        parameters=[
            OpenApiParameter("Idempotency-Key", {"type": "string"}, "header", description="Own."),
            OpenApiParameter("Idempotency-Replayed", {"type": "boolean"}, "header", response=[201], description="Own."),
        ],
        responses={201: LabelSerializer, (409, "application/problem+json"): own, (400, "application/json"): own},
    )
    @idempotent("tests.own")
    def post(self, request):
        return Response(status=201)

    operation = described(post)
    responses = operation["responses"]
    assert [header["description"] for header in operation["parameters"]] == ["Own."]
    assert responses["201"]["headers"]["Idempotency-Replayed"]["description"] == "Own."
    assert responses["409"]["content"] == {"application/problem+json": {"schema": {"type": "string"}}}
    assert responses["400"]["content"].keys() == {"application/json", "application/problem+json"}
    assert responses["400"]["description"] == "Ours."

    whole = extend_schema(operation={"operationId": "own", "responses": {"201": {"description": "Own."}}})(handler())
    assert described(whole)["responses"] == {"201": {"description": "Own."}}


def other_shape(request, error):
    return Response(status=error.status_code)


@pytest.mark.parametrize("shaped", ["by the setting", "by DRF's handler"])
def test_errors_of_another_shape_are_not_described(settings, shaped):
    members = {}
    if shaped == "by the setting":
        settings.IDEMPOTENCY = {"ERROR_RESPONSE": f"{__name__}.other_shape"}
    else:
        members["get_exception_handler"] = lambda view: other_shape
    responses = described(handler(), **members)["responses"]
    assert responses.keys() >= OURS
    assert "content" not in responses["422"]

    class Shaped(AutoSchema):
        def get_problem_content(self):
            return {"application/json": {"schema": {"type": "object"}}}

    assert described(handler(), schema=Shaped, **members)["responses"]["422"]["content"].keys() == {"application/json"}


def test_a_reference_to_a_response_stays_a_reference():
    class Referring(AutoSchema):
        def _get_response_bodies(self, *args, **kwargs):
            return {"201": {"$ref": "#/components/responses/Own"}}

    assert described(handler(), schema=Referring)["responses"]["201"] == {"$ref": "#/components/responses/Own"}


def test_each_method_of_an_action_is_described_separately():
    class Shop(IdempotentMixin, viewsets.GenericViewSet):
        schema = AutoSchema()
        serializer_class = LabelSerializer
        idempotent_operations = {"both": "tests.shop"}

        def both(self, request): ...

    patterns = [path("both/", Shop.as_view({"get": "both", "post": "both"}))]
    methods = SchemaGenerator(patterns=patterns).get_schema(request=None, public=True)["paths"]["/both/"]
    assert [method for method, operation in methods.items() if header_of(operation)] == ["post"]


#: The problems that a schema of ``POLICY`` names, and the error component of each profile.
DESCRIBED = ["key_missing", "key_invalid", "key_expired", "payload_invalid", "account_required", "in_progress"]
DESCRIBED += ["outcome_unknown", "body_gone", "key_reused", "unavailable"]
COMPONENTS = {"ietf": "IdempotencyProblem", "stripe": "IdempotencyErrorObject", "acp": "IdempotencyError"}


def codes_of(profile):
    """The codes by status. ``test_profiles`` tests the name of each code."""
    codes = defaultdict(set)
    for code in DESCRIBED:
        answer = profile.answers[f"idempotency_{code}"]
        codes[str(answer.status)].add(answer.code)
    return codes


POLICY = {"max_key_age": timedelta(days=1), "body_retention": timedelta(hours=1)}


def by_spectacular(policy, *others):
    """The URL patterns of a route, and the function that makes its schema."""

    class Documented(APIView):
        schema = AutoSchema()

        @extend_schema(request=LabelSerializer, responses=dict.fromkeys([201, *others], LabelSerializer))
        @idempotent("tests.described_by_profile", **policy)
        def post(self, request):
            return Response({"label": "made"}, status=201)

    patterns = (path("", Documented.as_view()),)
    return patterns, partial(SchemaGenerator(patterns=patterns).get_schema, request=None, public=True)


def by_ninja(policy):
    ninja = pytest.importorskip("ninja", reason="Django Ninja is not installed")
    api = ninja.NinjaAPI(auth=lambda request: request.headers["Authorization"], urls_namespace="tests-profiles")

    @api.post("/", response={201: dict[str, str]})
    @idempotent("tests.described_by_profile", account=lambda request: "alice", **policy)
    def create(request: HttpRequest) -> Any:
        return {"label": "made"}

    return (path("", api.urls),), lambda: json.loads(json.dumps(api.get_openapi_schema(path_prefix="")))


each_schema = pytest.mark.parametrize("make", [by_spectacular, by_ninja])
each_profile = pytest.mark.parametrize("profile", PROFILES)


def operation_of(document):
    """The one operation of a schema, with its references to problems resolved."""
    operation = document["paths"]["/"]["post"]
    for response in operation["responses"].values():
        for content in response.get("content", {}).values():
            name = content["schema"].get("$ref", "").removeprefix("#/components/schemas/")
            if name.startswith("Idempotency"):
                content["schema"] = {"title": name, **document["components"]["schemas"][name]}
    return operation


@pytest.mark.once
@each_schema
@each_profile
@pytest.mark.parametrize("chosen_by", ["the setting", "the operation"])
def test_each_profile_is_described(make, profile, chosen_by, settings):
    source, content_type = PROFILES[profile], PROFILES[profile].content_type
    settings.IDEMPOTENCY = {"PROFILE": profile} if chosen_by == "the setting" else {"PROFILE": "ietf"}
    operation = operation_of(make(POLICY if chosen_by == "the setting" else {**POLICY, "profile": profile})[1]())
    answers = {status: answer for status, answer in operation["responses"].items() if status != "201"}
    described = {status: set(re.findall(r"`(\w+)`", answer["description"])) for status, answer in answers.items()}
    assert described == codes_of(source)
    assert {(*answer["content"],) for answer in answers.values()} == {(content_type,)}
    assert {answer["content"][content_type]["schema"]["title"] for answer in answers.values()} == {COMPONENTS[profile]}
    marked = [name for name in operation["responses"]["201"]["headers"] if name.endswith("Replayed")]
    assert marked == [source.replayed]


@pytest.mark.once
@each_schema
@pytest.mark.parametrize("required", [True, False])
def test_the_ignored_status_is_described_if_the_key_is_optional(make, required):
    headers = operation_of(make({"key_required": required})[1]())["responses"]["201"]["headers"]
    assert ("ignored" in headers["Idempotency-Status"]["schema"]["enum"]) is not required


@pytest.mark.once
@pytest.mark.django_db(transaction=True)
@each_schema
@each_profile
def test_responses_match_the_schema(make, profile, settings, alice):
    source, content_type = PROFILES[profile], PROFILES[profile].content_type
    settings.IDEMPOTENCY = {"PROFILE": profile}
    settings.ROOT_URLCONF, document = make({})
    responses = operation_of(document())["responses"]
    first, replay = (alice.post(data={"amount": 1}, key="k") for _ in range(2))
    assert (first.status_code, source.replayed in first, replay[source.replayed]) == (201, False, "true")
    for answer in (first, replay):
        for name, header in responses["201"]["headers"].items():
            if name != "Idempotency-Retention" and name in answer:
                jsonschema.validate(answer[name], header["schema"])
    sent = set()
    for answer in refusals(alice).values():
        assert answer["Content-Type"] == content_type
        body = answer.json()
        jsonschema.validate(body, responses[str(answer.status_code)]["content"][content_type]["schema"])
        code = body.get("error", body)["code"]
        assert code in codes_of(source)[str(answer.status_code)]
        sent.add(code)
    assert len(sent) == 4


@pytest.mark.once
@pytest.mark.django_db(transaction=True)
def test_a_status_code_of_outcomes_and_refusals_documents_both(settings, alice):
    settings.ROOT_URLCONF, document = by_spectacular({}, 422)
    described = document()["paths"]["/"]["post"]["responses"]["422"]["headers"]["Idempotency-Status"]
    alice.post(data={"label": "one"}, key="k")
    refused = alice.post(data={"label": "two"}, key="k")
    assert (refused.status_code, refused["Idempotency-Status"]) == (422, "reused")
    jsonschema.validate(refused["Idempotency-Status"], described["schema"])
