"""The handler finds its request as it would without protection, whatever of it the fingerprint has read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test.client import encode_multipart
from rest_framework.decorators import api_view, parser_classes
from rest_framework.parsers import FormParser, JSONParser, MultiPartParser
from rest_framework.request import Request
from rest_framework.response import Response

from idempotency import idempotent
from idempotency.models import IdempotencyRecord
from tests.http.callers import FORM, Caller, Serve, effects, multipart, problem_code
from tests.http.views import work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.failure_mode(39)
@pytest.mark.parametrize(
    "sent",
    [
        {"data": b"raw \xff", "content_type": "application/octet-stream"},
        {"data": b'{"a": 1}', "content_type": "application/json"},
        {"data": b"a=1&b=2", "content_type": FORM},
        multipart({"a": "1", "file": SimpleUploadedFile("a", b"a" * 100)}, "one"),
    ],
    ids=["bytes", "json", "form", "multipart"],
)
@pytest.mark.parametrize("reads", ["body", "POST and FILES", "stream", "both"])
def test_a_plain_handler_reads_its_request_as_ever(
    alice: Caller, serve: Serve, sent: dict[str, Any], reads: str
) -> None:
    def handler(request: HttpRequest) -> HttpResponse:
        seen: list[Any] = []
        if reads in {"body", "both"}:
            seen.append(request.body.decode("latin-1"))
        if reads in {"POST and FILES", "both"}:
            seen.append(dict(request.POST.lists()))
            seen.append({name: file.read().decode() for name, file in request.FILES.items()})
        if reads == "stream":
            seen.append(request.read().decode("latin-1"))
        return JsonResponse({"seen": seen})

    serve(idempotent("tests.reading")(handler), **{"twin/": handler})
    assert alice.post("/", key="k", **sent).content == alice.post("/twin/", **sent).content


@pytest.mark.failure_mode(39)
@pytest.mark.parametrize("reads", ["body", "data", "body and data", "FILES"])
@pytest.mark.parametrize(
    "sent",
    [
        {"data": b'{"a": 1}', "content_type": "application/json"},
        {"data": b"a=1&b=2", "content_type": FORM},
        multipart({"a": "1", "file": SimpleUploadedFile("a", b"a" * 100)}, "one"),
    ],
    ids=["json", "form", "multipart"],
)
def test_a_drf_handler_reads_its_request_as_ever(alice: Caller, serve: Serve, sent: dict[str, Any], reads: str) -> None:
    def handler(request: Request) -> Response:
        seen: list[Any] = []
        if reads in {"body", "body and data"}:
            seen.append(request.body.decode("latin-1"))
        if reads in {"data", "body and data"}:
            seen.append({name: str(value) for name, value in request.data.items()})
        if reads == "FILES":
            seen.append({name: file.read().decode() for name, file in request.FILES.items()})
        return Response({"seen": seen})

    parsers = parser_classes([JSONParser, FormParser, MultiPartParser])
    twin = api_view(["POST"])(parsers(handler))
    protected = api_view(["POST"])(parsers(idempotent("tests.reading")(handler)))
    serve(protected, **{"twin/": twin})
    answers = [alice.post("/", key="k", **sent), alice.post("/twin/", **sent)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].content == answers[1].content


@pytest.mark.failure_mode(39)
@pytest.mark.parametrize("framework", ["plain", "drf"])
def test_an_upload_above_the_limit_of_memory_is_fingerprinted_and_left_to_the_handler(
    alice: Caller, serve: Serve, framework: str
) -> None:
    size = 3 * 1024 * 1024  # above DATA_UPLOAD_MAX_MEMORY_SIZE and FILE_UPLOAD_MAX_MEMORY_SIZE

    def handler(request: Any) -> Any:
        work(request)
        seen = {"size": len(request.FILES["file"].read()), "amount": request.POST["amount"]}
        return Response(seen) if framework == "drf" else JsonResponse(seen)

    protected = idempotent("tests.upload")(handler)
    serve(api_view(["POST"])(parser_classes([MultiPartParser])(protected)) if framework == "drf" else protected)

    def upload(boundary: str, last: bytes = b"a") -> dict[str, Any]:
        file = SimpleUploadedFile("large.bin", b"a" * (size - 1) + last)
        return multipart({"amount": "1", "file": file}, boundary)

    first = alice.post(key="k", **upload("one"))
    assert json.loads(first.content) == {"size": size, "amount": "1"}
    assert alice.post(key="k", **upload("two")).content == first.content
    assert problem_code(alice.post(key="k", **upload("one", last=b"b"))) == "idempotency_key_reused"
    assert effects() == 1


@pytest.mark.failure_mode(39)
@pytest.mark.parametrize("framework", ["plain", "drf"])
@pytest.mark.parametrize("reads_body", [False, True], ids=["handler reads nothing", "handler reads the body"])
def test_a_body_above_the_limit_of_memory_is_never_a_server_error(
    alice: Caller, serve: Serve, settings: Any, framework: str, reads_body: bool
) -> None:
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000

    def handler(request: Any) -> Any:
        seen = {"length": len(request.body) if reads_body else 0}
        return JsonResponse(seen) if framework == "plain" else Response(seen)

    def as_view(view: Any) -> Any:
        parsers = parser_classes([JSONParser, FormParser, MultiPartParser])
        return view if framework == "plain" else api_view(["POST"])(parsers(view))

    serve(as_view(idempotent("tests.large")(handler)), **{"twin/": as_view(handler)})
    data = encode_multipart("one", {"a": SimpleUploadedFile("a", b"a" * 2000)})
    for content_type in ("application/json", FORM, "multipart/form-data; boundary=one"):
        twin = alice.post("/twin/", data, content_type=content_type)
        assert twin.status_code == (400 if reads_body else 200)
        assert alice.post("/", data, key=content_type[:5], content_type=content_type).status_code in {
            400,
            twin.status_code,
        }


@pytest.mark.failure_mode(39)
@pytest.mark.parametrize("length", ["", "abc", "-1", "0", "5"])
@pytest.mark.parametrize("content_type", ["application/json", FORM, "multipart/form-data; boundary=one"])
def test_a_content_length_that_lies_is_never_a_server_error(
    alice: Caller, serve: Serve, length: str, content_type: str
) -> None:
    def handler(request: HttpRequest) -> HttpResponse:
        return JsonResponse({"length": len(request.body)})

    serve(idempotent("tests.lying")(handler), **{"twin/": handler})
    sent = {"data": b"a=1&b=2222", "content_type": content_type, "CONTENT_LENGTH": length}
    twin = alice.post("/twin/", **sent)  # Django 5.2 fails at a length that is no number
    assert alice.post("/", key="k", **sent).status_code in {200, 400, twin.status_code}


class OwnParser(MultiPartParser):
    """A parser of the project's own, which uses the stream up."""


@pytest.mark.failure_mode(39)
def test_a_drf_handler_is_told_that_a_parsed_body_is_too_large_to_be_read(
    alice: Caller, serve: Serve, settings: Any
) -> None:
    """DRF parses a form of any size; Django refuses to hand its body out whole."""
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000

    def handler(request: Request) -> Response:
        return Response({"length": len(request.body)})

    def as_view(view: Any) -> Any:
        return api_view(["POST"])(parser_classes([OwnParser])(view))

    serve(as_view(idempotent("tests.large")(handler)), **{"twin/": as_view(handler)})
    sent = multipart({"file": SimpleUploadedFile("a", b"a" * 2000)}, "one")
    twin = alice.post("/twin/", **sent)
    assert alice.post("/", key="k", **sent).status_code == twin.status_code == 400
    assert IdempotencyRecord.objects.get().response_status == 400
