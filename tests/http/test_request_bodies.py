"""The handler can read its request as without protection, although the fingerprint has read it before."""

import json
from hashlib import sha256
from unittest.mock import Mock

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.files.uploadhandler import FileUploadHandler, TemporaryFileUploadHandler
from django.http import HttpRequest, JsonResponse
from django.http.multipartparser import MultiPartParser as DjangoParser
from rest_framework.parsers import MultiPartParser

from idempotency import idempotent
from idempotency.http import payload
from idempotency.http.key_sources import FromForm
from idempotency.models import IdempotencyRecord
from tests.http.callers import FORM, assert_refused, multipart
from tests.http.serving import Framework, after, parse_as_post
from tests.http.views import plain_answer, work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_39, pytest.mark.once]

SMALL = 100
#: Above DATA_UPLOAD_MAX_MEMORY_SIZE and FILE_UPLOAD_MAX_MEMORY_SIZE.
LARGE = 3 * 1024 * 1024

sizes = pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])


def upload(size, boundary="one", last=b"a"):
    file = SimpleUploadedFile("upload.txt", b"a" * (size - 1) + last, "text/plain; charset=latin-1")
    return multipart({"amount": "1", "file": file}, boundary)


SENT = {
    "bytes": {"data": b"raw \xff", "content_type": "application/octet-stream"},
    "json": {"data": b'{"a": 1}'},
    "form": {"data": b"a=1&b=2", "content_type": FORM},
    "multipart": upload(SMALL),
    "large multipart": upload(LARGE),
}

#: The parts of a request that a handler may read, in this order.
READS = {
    "body": lambda request: sha256(request.body).hexdigest(),
    "data": lambda request: {name: str(value) for name, value in request.data.items()},
    "POST": lambda request: dict(request.POST.lists()),
    "FILES": lambda request: {name: sha256(file.read()).hexdigest() for name, file in request.FILES.items()},
    "stream": lambda request: sha256(request.read()).hexdigest(),
}


def with_twin(alice, **sent):
    return alice.post(key="k", **sent), alice.post("/twin/", **sent)


@pytest.mark.parametrize("sent", SENT.values(), ids=SENT)
@pytest.mark.parametrize(
    ("name", "reads"),
    [
        *[("plain", "body"), ("plain", "POST FILES"), ("plain", "stream"), ("plain", "body POST FILES")],
        *[("drf", "body"), ("drf", "data"), ("drf", "body data"), ("drf", "FILES")],
    ],
)
def test_a_handler_reads_its_request(alice, serve, sent, name, reads, settings):
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = min(len(sent["data"]), LARGE)  # a small body is exactly within the limit
    Framework(name, serve).serve_twins(lambda request: {part: READS[part](request) for part in reads.split()})
    protected, twin = with_twin(alice, **sent)
    assert (protected.status_code, protected.content) == (twin.status_code, twin.content)


@pytest.mark.parametrize("reads", [False, True], ids=["handler reads nothing", "handler reads the body"])
def test_a_body_above_the_limit_does_not_crash(alice, framework, settings, reads):
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000
    framework.serve_twins(lambda request: {"length": len(request.body) if reads else 0})
    data = upload(2000)["data"]
    for content_type in ("application/json", FORM, "multipart/form-data; boundary=one"):
        protected, twin = with_twin(alice, data=data, content_type=content_type)
        assert twin.status_code == (400 if reads else 200)
        allowed = {twin.status_code} if content_type.startswith("multipart") else {400}
        if content_type == FORM:  # each release of DRF has its own limit for a form
            allowed.add(twin.status_code)
        assert protected.status_code in allowed
        IdempotencyRecord.objects.all().delete()


def test_a_drf_handler_gets_the_error_for_a_too_large_parsed_body(alice, serve, settings):
    """DRF parses a form of any size. Django refuses to return such a body as bytes."""
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000
    own = type("OwnParser", (MultiPartParser,), {})  # a project's parser, which consumes the stream
    Framework("drf", serve).serve_twins(lambda request: {"length": len(request.body)}, parsers=[own])
    protected, twin = with_twin(alice, **upload(2000))
    assert protected.status_code == twin.status_code == 400
    assert IdempotencyRecord.objects.get().response_status == 400


@pytest.mark.parametrize("length", ["", "abc", "-1", "0", "5"])
@pytest.mark.parametrize("content_type", ["application/json", FORM, "multipart/form-data; boundary=one"])
def test_a_wrong_content_length_is_not_a_server_error(alice, serve, length, content_type):
    Framework("plain", serve).serve_twins(lambda request: {"length": len(request.body)})
    protected, twin = with_twin(alice, data=b"a=1&b=2222", content_type=content_type, CONTENT_LENGTH=length)
    assert protected.status_code in {200, 400, twin.status_code}  # Django 5.2 fails on a non-numeric length


class Counting(FileUploadHandler):
    """A project's upload handler: it counts the bytes and passes them to the next handler."""

    seen = 0

    def receive_data_chunk(self, raw_data, start):
        self.seen += len(raw_data)
        return raw_data

    def file_complete(self, file_size):
        return None


@pytest.mark.parametrize("choice", ["leave", "insert", "replace"])
@sizes
def test_an_upload_is_fingerprinted_and_its_handler_chooses_its_storage(alice, framework, size, choice):
    alice.transport = "asgi" if choice == "insert" else "wsgi"

    def handler(request):
        http = getattr(request, "_request", request)
        counting = Counting(http)
        if choice == "insert":
            http.upload_handlers.insert(0, counting)
        elif choice == "replace":
            http.upload_handlers = [counting, TemporaryFileUploadHandler(http)]
        work(request)
        files = {name: len(file.read()) for name, file in request.FILES.items()}
        return {"counted": counting.seen, "sizes": files, "amount": request.POST["amount"]}

    framework.serve(handler)
    counted = 0 if choice == "leave" else size
    first = alice.post(key="k", **upload(size))
    assert json.loads(first.content) == {"counted": counted, "sizes": {"file": size}, "amount": "1"}
    replay = alice.post(key="k", **upload(size, boundary="two"))
    assert (replay.content, replay["Idempotency-Replayed"]) == (first.content, "true")
    assert_refused(alice, "idempotency_key_reused", key="k", **upload(size, last=b"b"))


@sizes
def test_an_upload_is_parsed_in_chunks_and_only_a_large_one_uses_disk(alice, serve, size, monkeypatch):
    parser, disk, limits = Mock(wraps=DjangoParser), Mock(wraps=payload.TemporaryFile), []
    monkeypatch.setattr(payload, "MultiPartParser", parser)
    monkeypatch.setattr(payload, "TemporaryFile", disk)
    monkeypatch.setattr(HttpRequest, "read", lambda self, *limit: limits.append(limit) or self._stream.read(*limit))
    serve(idempotent("tests.upload", key=FromForm("amount"))(plain_answer))
    assert alice.post(**upload(size)).status_code == 201
    assert (parser.call_count, disk.call_count) == (1, size == LARGE)
    assert size == SMALL or max(limit for (limit,) in limits) < SMALL * 1000


@sizes
def test_a_form_parsed_before_the_view_has_the_same_fingerprint(alice, serve, size):
    """The CSRF check may parse the form before the view. That must not change the payload."""
    protected = idempotent("tests.parsed")(lambda request: JsonResponse({"size": len(request.FILES["file"].read())}))

    serve(after(lambda request: "parsed" in request.headers and request.POST, protected))
    first = alice.post(key="k", headers={"Parsed": "yes"}, **upload(size))
    assert json.loads(first.content) == {"size": size}
    assert alice.post(key="k", **upload(size)).content == first.content


@sizes
@pytest.mark.parametrize(("name", "method"), [("plain", "PUT"), ("plain", "PATCH"), ("drf", "PATCH")])
def test_a_put_or_patch_form_that_was_parsed_early_is_read_and_compared(alice, serve, name, method, size):
    def handler(request):
        work(request)
        files = request.FILES if name == "plain" else request.data
        fields = request.POST if name == "plain" else request.data
        return {"size": len(files["file"].read()), "amount": fields["amount"]}

    protect = idempotent("tests.parsed", methods=("PUT", "PATCH"))
    view = Framework(name, serve).view(handler)
    protected = Framework(name, serve).view(handler, protect)
    serve(after(parse_as_post, protected), **{"twin/": after(parse_as_post, view)})
    first = alice.request(method, key="k", **upload(size))
    assert json.loads(first.content) == {"size": size, "amount": "1"}
    assert alice.request(method, "/twin/", **upload(size)).content == first.content
    replay = alice.request(method, key="k", **upload(size, boundary="two"))
    assert (replay.content, replay.headers.get("Idempotency-Replayed")) == (first.content, "true")
    assert_refused(alice, "idempotency_key_reused", method=method, key="k", **upload(size, last=b"b"))


reads_body = pytest.mark.parametrize("reads_body", [False, True], ids=["a stream", "a body in memory"])


@reads_body
@pytest.mark.parametrize("fields", [{}, {"a": "b"}], ids=["no fields", "fields"])
def test_a_form_without_files_that_a_middleware_parsed_is_compared(alice, serve, reads_body, fields):
    protected = idempotent("tests.parsed")(lambda request: JsonResponse({"fields": len(request.POST)}))

    def parse(request):
        if reads_body:
            request.body  # noqa: B018 - buffers it
        parse_as_post(request)

    serve(after(parse, protected))
    first = alice.request("PATCH", key="k", **multipart(fields))
    assert json.loads(first.content) == {"fields": len(fields)}
    boundary = "one" if reads_body and not fields else "two"  # a form without fields looks unparsed
    assert alice.request("PATCH", key="k", **multipart(fields, boundary)).content == first.content


@reads_body
def test_an_unparsed_form_is_compared_by_its_bytes(alice, serve, reads_body):
    """Django returns an empty form for PATCH, and the handler may read the body."""
    protected = idempotent("tests.bytes")(lambda request: JsonResponse({"length": len(request.body)}))

    def access(request):
        assert not (reads_body and not request.body)
        assert not request.POST

    serve(after(access, protected))
    first = alice.request("PATCH", key="k", **upload(SMALL))
    assert json.loads(first.content)["length"] > SMALL
    assert_refused(alice, "idempotency_key_reused", method="PATCH", key="k", **upload(SMALL, last=b"b"))


@sizes
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("parameters", ["; boundary=", "", "; boundary=\xfc"], ids=["empty", "missing", "not ASCII"])
def test_an_unparsable_form_is_refused_as_by_django(alice, serve, settings, size, debug, parameters):
    settings.DEBUG = debug
    Framework("plain", serve).serve_twins(lambda request: {"fields": len(request.POST)})
    sent = {**upload(size), "content_type": f"multipart/form-data{parameters}"}
    assert [answer.status_code for answer in with_twin(alice, **sent)] == [400, 400]
    assert not IdempotencyRecord.objects.exists()


def test_a_form_is_compared_by_the_result_of_the_projects_parser(alice, serve):
    class IgnoringFiles(MultiPartParser):
        def parse(self, stream, *args, **kwargs):
            return super().parse(stream, *args, **kwargs).data

    Framework("drf", serve).serve_twins(lambda request: {"fields": sorted(request.data)}, parsers=[IgnoringFiles])
    first = alice.post(key="k", **upload(SMALL))
    assert json.loads(first.content) == {"fields": ["amount"]}
    assert alice.post(key="k", **upload(SMALL, last=b"b")).content == first.content


def test_with_payload_declared_the_body_is_left_to_the_handler(alice, serve):
    def handler(request):
        request.upload_handlers = [TemporaryFileUploadHandler(request)]
        return {"size": len(request.FILES["file"].read())}

    Framework("plain", serve).serve(handler, payload=lambda request: request.GET["of"])
    first = alice.post("/?of=1", key="k", **upload(LARGE))
    assert json.loads(first.content) == {"size": LARGE}
    assert alice.post("/?of=1", key="k", **upload(SMALL)).content == first.content
