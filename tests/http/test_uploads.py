"""A multipart form is compared without taking it from its handler, which may still say how its files are stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.files.uploadhandler import FileUploadHandler, MemoryFileUploadHandler, TemporaryFileUploadHandler
from django.http import HttpRequest, JsonResponse
from django.test.client import encode_multipart
from rest_framework.decorators import api_view, parser_classes
from rest_framework.parsers import MultiPartParser
from rest_framework.request import Request
from rest_framework.response import Response

from idempotency import idempotent
from idempotency.models import IdempotencyRecord
from tests.http.callers import Caller, Serve, effects, multipart, problem_code
from tests.http.views import work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_mode(39)]

SMALL = 100
#: Above DATA_UPLOAD_MAX_MEMORY_SIZE and FILE_UPLOAD_MAX_MEMORY_SIZE.
LARGE = 3 * 1024 * 1024


class Counting(FileUploadHandler):
    """An upload handler of a project: it counts what comes through, and leaves it to the next one."""

    seen = 0

    def receive_data_chunk(self, raw_data: bytes, start: int) -> bytes:
        self.seen += len(raw_data)
        return raw_data

    def file_complete(self, file_size: int) -> None:
        return None


def insert(http: HttpRequest, counting: Counting) -> None:
    http.upload_handlers.insert(0, counting)


def replace(http: HttpRequest, counting: Counting) -> None:
    http.upload_handlers = [counting, TemporaryFileUploadHandler(http)]


def seen_by(http: HttpRequest, request: Any, choose: Callable[[HttpRequest, Counting], None]) -> dict[str, Any]:
    counting = Counting(http)
    choose(http, counting)
    files = {name: file.read() for name, file in request.FILES.items()}
    return {
        "counted": counting.seen,
        "sizes": {name: len(content) for name, content in files.items()},
        "amount": request.POST["amount"],
    }


def upload(size: int, boundary: str = "one", last: bytes = b"a") -> dict[str, Any]:
    file = SimpleUploadedFile("upload.bin", b"a" * (size - 1) + last)
    return multipart({"amount": "1", "file": file}, boundary)


@pytest.mark.parametrize("choose", [insert, replace])
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("framework", ["plain", "drf"])
def test_a_handler_chooses_its_upload_handlers(
    alice: Caller, serve: Serve, transport: str, framework: str, size: int, choose: Any
) -> None:
    alice.transport = transport

    def plain(request: HttpRequest) -> JsonResponse:
        work(request)
        return JsonResponse(seen_by(request, request, choose))

    def drf(request: Request) -> Response:
        work(request)
        return Response(seen_by(request._request, request, choose))

    protected: Any = idempotent("tests.upload")(plain if framework == "plain" else drf)
    if framework == "drf":
        protected = api_view(["POST"])(parser_classes([MultiPartParser])(protected))
    serve(protected)
    first = alice.post(key="k", **upload(size))
    assert json.loads(first.content) == {"counted": size, "sizes": {"file": size}, "amount": "1"}
    replay = alice.post(key="k", **upload(size, boundary="two"))
    assert (replay.content, replay["Idempotency-Replayed"]) == (first.content, "true")
    assert problem_code(alice.post(key="k", **upload(size, last=b"b"))) == "idempotency_key_reused"
    assert effects() == 1


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_a_form_that_was_parsed_before_is_the_same_form(alice: Caller, serve: Serve, size: int) -> None:
    """As the check of a CSRF token does it, in a middleware or not, which must not decide what the payload is."""
    protected = idempotent("tests.parsed")(lambda request: JsonResponse({"size": len(request.FILES["file"].read())}))

    def parsing(request: HttpRequest) -> Any:
        if "parsed" in request.headers:
            request.POST  # noqa: B018 - parses the form
        return protected(request)

    serve(parsing)
    first = alice.post(key="k", headers={"Parsed": "yes"}, **upload(size))
    assert json.loads(first.content) == {"size": size}
    assert alice.post(key="k", **upload(size)).content == first.content
    assert IdempotencyRecord.objects.count() == 1


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_the_body_of_a_large_form_is_read_as_unprotected(alice: Caller, serve: Serve, size: int) -> None:
    def handler(request: HttpRequest) -> JsonResponse:
        return JsonResponse({"length": len(request.read())})

    serve(idempotent("tests.read")(handler), **{"twin/": handler})
    twin = alice.post("/twin/", **upload(size))
    assert alice.post(key="k", **upload(size)).content == twin.content


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    "damage",
    [
        {"content_type": "multipart/form-data; boundary="},
        {"content_type": "multipart/form-data"},
        {"content_type": "multipart/form-data; boundary=\xfc"},
    ],
    ids=["empty", "missing", "not ASCII"],
)
def test_a_form_that_cannot_be_parsed_is_refused_as_django_refuses_it(
    alice: Caller, serve: Serve, settings: Any, size: int, debug: bool, damage: dict[str, str]
) -> None:
    settings.DEBUG = debug

    def handler(request: HttpRequest) -> JsonResponse:
        return JsonResponse({"fields": len(request.POST)})

    serve(idempotent("tests.damaged")(handler), **{"twin/": handler})
    sent = {**upload(size), **damage}
    assert alice.post("/twin/", **sent).status_code == alice.post(key="k", **sent).status_code == 400
    assert not IdempotencyRecord.objects.exists()


def test_a_form_has_djangos_limits(alice: Caller, serve: Serve, settings: Any) -> None:
    settings.DATA_UPLOAD_MAX_NUMBER_FIELDS = 3
    serve(idempotent("tests.limits")(lambda request: JsonResponse({})))
    data = encode_multipart("one", {str(number): "1" for number in range(4)})
    assert alice.post(data=data, key="k", content_type="multipart/form-data; boundary=one").status_code == 400
    assert not IdempotencyRecord.objects.exists()


def test_a_parser_of_the_projects_own_reads_its_forms_in_its_own_way(alice: Caller, serve: Serve) -> None:
    class IgnoringFiles(MultiPartParser):
        def parse(self, stream: Any, *args: Any, **kwargs: Any) -> Any:
            return super().parse(stream, *args, **kwargs).data

    @api_view(["POST"])
    @parser_classes([IgnoringFiles])
    @idempotent("tests.parser")
    def view(request: Request) -> Response:
        return Response({"fields": sorted(request.data)})

    serve(view)
    first = alice.post(key="k", **upload(SMALL))
    assert json.loads(first.content) == {"fields": ["amount"]}
    assert alice.post(key="k", **upload(SMALL, last=b"b")).content == first.content


def test_what_a_command_stands_for_is_not_read_at_all(alice: Caller, serve: Serve) -> None:
    def handler(request: HttpRequest) -> JsonResponse:
        request.upload_handlers = [MemoryFileUploadHandler(request), TemporaryFileUploadHandler(request)]
        return JsonResponse({"size": len(request.FILES["file"].read())})

    serve(idempotent("tests.command", command=lambda request: request.GET["of"])(handler))
    first = alice.post("/?of=1", key="k", **upload(LARGE))
    assert json.loads(first.content) == {"size": LARGE}
    assert alice.post("/?of=1", key="k", **upload(SMALL)).content == first.content
