"""The OpenAPI schema of protected operations, as drf-spectacular makes it with our ``AutoSchema``."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import jsonschema
import pytest
import yaml
from django.core.management import call_command
from django.urls import path
from drf_spectacular import openapi
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from drf_spectacular.validation import validate_schema
from rest_framework import viewsets
from rest_framework.decorators import action
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency import ACCEPTED, Attach, idempotent
from idempotency.contrib.openapi import KEY_SCHEMA
from idempotency.contrib.rest_framework import IdempotentMixin
from idempotency.contrib.spectacular import AutoSchema
from idempotency.exceptions import KeyInvalidError
from idempotency.http.key_sources import FromForm
from idempotency.identity.keys import parse_header
from tests.http.callers import Caller
from tests.http.views import LabelSerializer

OURS = {"400", "401", "409", "422", "503"}


def described(handler: Any, *, schema: type[openapi.AutoSchema] = AutoSchema, **members: Any) -> dict[str, Any]:
    view = type("Documented", (APIView,), {"post": handler, "schema": schema(), **members})
    document = SchemaGenerator(patterns=[path("", view.as_view())]).get_schema(request=None, public=True)
    validate_schema(document)
    operation: dict[str, Any] = document["paths"]["/"]["post"]
    return operation


def handler(name: str = "tests.described", **policy: Any) -> Any:
    @extend_schema(request=None, responses={201: LabelSerializer, 418: None, 503: None})
    @idempotent(name, **policy)
    def post(self: APIView, request: Any) -> Response:
        return Response(status=201)

    return post


def header_of(operation: dict[str, Any]) -> list[dict[str, Any]]:
    return [parameter for parameter in operation.get("parameters", []) if parameter["in"] == "header"]


def test_the_sample_projects_schema_is_valid_and_describes_protected_operations_only(tmp_path: Path) -> None:
    file = tmp_path / "schema.yaml"
    call_command("spectacular", file=str(file), validate=True, fail_on_warn=True)
    document = yaml.safe_load(file.read_text())
    protected = {
        f"{method} {route}"
        for route, operations in document["paths"].items()
        for method, operation in operations.items()
        if header_of(operation) and set(operation["responses"]) >= OURS
    }
    assert protected == {"post /charges/", "post /orders/"}
    assert [name for name in document["components"]["schemas"] if "Problem" in name] == ["IdempotencyProblem"]
    assert "409" not in document["paths"]["/unprotected/orders/"]["post"]["responses"]


@pytest.mark.django_db(transaction=True)
def test_answers_are_as_the_schema_describes_them(alice: Caller) -> None:
    document = SchemaGenerator().get_schema(request=None, public=True)
    responses = document["paths"]["/charges/"]["post"]["responses"]
    problem = document["components"]["schemas"]["IdempotencyProblem"]
    payload = {"amount": 1, "currency": "usd"}
    answers = [alice.post("/charges/", payload, key="k") for _ in range(2)]
    answers += [alice.post("/charges/", {**payload, "amount": 2}, key="k"), alice.post("/charges/", payload)]
    assert [answer.status_code for answer in answers] == [201, 201, 422, 400]
    for answer in answers:
        described = responses[str(answer.status_code)]
        assert answer["Content-Type"] in described["content"]
        for header in ("Idempotency-Replayed", "Idempotency-Key") if answer.status_code == 201 else ():
            if header in answer:
                jsonschema.validate(answer[header], described["headers"][header]["schema"])
    assert "Idempotency-Replayed" in answers[1]
    for answer in answers[2:]:
        jsonschema.validate(json.loads(answer.content), problem)


def accepts(value: str) -> bool:
    try:
        parse_header(value)
    except KeyInvalidError:
        return False
    return True


def test_the_header_is_described_as_it_is_read() -> None:
    values = [
        "",
        "k",
        '"k"',
        "k" * 255,
        "k" * 256,
        f'"{"k" * 255}"',
        f'"{"k" * 256}"',
        '"' + '\\"' * 255 + '"',
        '"a\\b"',
    ]
    values += [text.format(chr(code)) for code in range(0x1F, 0x82) for text in ("a{}b", '"a{}b"')]
    described = {
        value
        for value in values
        if re.search(KEY_SCHEMA["pattern"], value) and KEY_SCHEMA["minLength"] <= len(value) <= KEY_SCHEMA["maxLength"]
    }
    assert described == set(filter(accepts, values))


def test_an_operation_is_described_by_its_policy() -> None:
    strict, lenient = described(handler()), described(handler(name="tests.lenient", required=False))
    assert [header["required"] for header in header_of(strict)] == [True]
    assert "required" not in header_of(lenient)[0]
    elsewhere = described(
        handler(name="tests.elsewhere", key=FromForm(), max_key_age=timedelta(days=1), body_ttl=timedelta(hours=1))
    )
    assert "required" not in header_of(elsewhere)[0]
    told = [answers["responses"]["400"]["description"] for answers in (strict, elsewhere)]
    assert ["idempotency_key_expired" in text for text in told] == [False, True]
    told = [answers["responses"]["409"]["description"] for answers in (strict, elsewhere)]
    assert ["idempotency_body_gone" in text for text in told] == [False, True]
    assert "idempotency_key_missing" in strict["responses"]["400"]["description"]
    assert "idempotency_key_missing" not in lenient["responses"]["400"]["description"]
    assert "Retry-After" in strict["responses"]["409"]["headers"]
    assert "202" not in strict["responses"]


@pytest.mark.parametrize(
    ("policy", "headers"),
    [
        ({"in_progress": ACCEPTED}, {"Retry-After"}),
        ({"in_progress": Attach(lambda scope: "/jobs/"), "rebuild": lambda *_: None}, {"Retry-After", "Location"}),
    ],
    ids=["accepted", "attached"],
)
def test_a_duplicate_that_is_accepted_is_described(policy: Any, headers: set[str]) -> None:
    assert described(handler(**policy))["responses"]["202"]["headers"].keys() >= headers


def test_answers_that_are_recorded_have_the_marker() -> None:
    responses = described(handler())["responses"]
    marked = {status for status, response in responses.items() if "Idempotency-Replayed" in response.get("headers", {})}
    assert marked == {"201", "418"}


@pytest.mark.parametrize("name", ["Idempotency-Key", "idempotency-key"])
def test_what_a_project_says_itself_wins(name: str) -> None:
    own = OpenApiResponse({"type": "string"}, description="Ours.")

    @extend_schema(
        request=None,
        parameters=[
            OpenApiParameter(name, {"type": "string"}, "header", description="Own."),
            OpenApiParameter("Idempotency-Replayed", {"type": "boolean"}, "header", response=[201], description="Own."),
        ],
        responses={201: LabelSerializer, (409, "application/problem+json"): own, (400, "application/json"): own},
    )
    @idempotent("tests.own")
    def post(self: APIView, request: Any) -> Response:
        return Response(status=201)

    operation = described(post)
    responses = operation["responses"]
    assert [(header["name"], header["description"]) for header in operation["parameters"]] == [(name, "Own.")]
    assert responses["201"]["headers"]["Idempotency-Replayed"]["description"] == "Own."
    assert responses["409"]["content"] == {"application/problem+json": {"schema": {"type": "string"}}}
    assert responses["400"]["content"].keys() == {"application/json", "application/problem+json"}
    assert responses["400"]["description"] == "Ours."

    whole = extend_schema(operation={"operationId": "own", "responses": {"201": {"description": "Own."}}})(handler())
    assert described(whole)["responses"] == {"201": {"description": "Own."}}


def other_shape(request: Any, error: Any) -> Response:
    return Response(status=error.status_code)


@pytest.mark.parametrize("shaped", ["by the setting", "by DRF's handler"])
def test_a_form_of_errors_that_is_not_ours_is_not_described(settings: Any, shaped: str) -> None:
    members: dict[str, Any] = {}
    if shaped == "by the setting":
        settings.IDEMPOTENCY = {"ERROR_RESPONSE": f"{__name__}.other_shape"}
    else:
        members["get_exception_handler"] = lambda view: other_shape
    responses = described(handler(), **members)["responses"]
    assert responses.keys() >= OURS
    assert "content" not in responses["422"]

    class Shaped(AutoSchema):
        def get_problem_content(self) -> Any:
            return {"application/json": {"schema": {"type": "object"}}}

    assert described(handler(), schema=Shaped, **members)["responses"]["422"]["content"].keys() == {"application/json"}


def test_a_reference_to_a_response_stays_a_reference() -> None:
    class Referring(AutoSchema):
        def _get_response_bodies(self, *args: Any, **kwargs: Any) -> Any:
            return {"201": {"$ref": "#/components/responses/Own"}}

    assert described(handler(), schema=Referring)["responses"]["201"] == {"$ref": "#/components/responses/Own"}


class Shop(IdempotentMixin, viewsets.GenericViewSet[Any]):
    """Actions that are routed to several methods."""

    schema = AutoSchema()
    serializer_class = LabelSerializer
    idempotent_operations: ClassVar = {"create": "tests.shop"}

    def create(self, request: Any) -> Response: ...
    def list(self, request: Any) -> Response: ...

    @action(detail=False, methods=["get", "post"])
    @idempotent("tests.shop_both")
    def both(self, request: Any) -> Response: ...


def test_each_method_of_an_action_is_described_as_it_is_protected() -> None:
    patterns = [
        path("shop/", Shop.as_view({"get": "list", "post": "create"})),
        path("both/", Shop.as_view({"get": "both", "post": "both"})),
    ]
    paths = SchemaGenerator(patterns=patterns).get_schema(request=None, public=True)["paths"]
    protected = {
        (route, method)
        for route, operations in paths.items()
        for method, operation in operations.items()
        if header_of(operation)
    }
    assert protected == {("/shop/", "post"), ("/both/", "post")}
