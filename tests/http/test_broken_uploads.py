"""A truncated body, which a WSGI server passes on if the client's connection ends, never counts as the whole body."""

import gzip
import zlib
from contextlib import nullcontext, suppress
from io import BytesIO

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import Http404, JsonResponse, UnreadablePostError
from django.template import engines
from django.template.response import TemplateResponse
from rest_framework.parsers import BaseParser, FileUploadParser

from idempotency import PARK, REEXECUTE, Reconcile, Unknown, idempotent
from idempotency.http.body_stream import BODY_STREAM, BodyStream, watch_body
from idempotency.http.key_sources import FromForm, FromHeader, FromJSON
from idempotency.lifecycle import Status
from idempotency.operation import registry
from tests.http.callers import FORM, effects, multipart, problem_code, records
from tests.http.serving import Framework, after, policies
from tests.http.views import plain_answer, work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_39, pytest.mark.once]

SMALL, LARGE = 2_000, 3 * 1024 * 1024  # DATA_UPLOAD_MAX_MEMORY_SIZE is between them


def upload(size):
    file = SimpleUploadedFile("upload.txt", b"a,b\n" * (size // 4), "text/plain")
    return multipart({"amount": "1", "file": file})


#: Bodies whose first half is still valid, as far as their format allows.
SENT = {
    "json": {"data": b'{"a": "%s"}' % (b"1" * SMALL)},
    "form": {"data": b"a=1&b=" + b"2" * SMALL, "content_type": FORM},
    "text": {"data": b"a,b\n" * SMALL, "content_type": "text/csv"},
    "multipart": upload(SMALL),
    "large multipart": upload(LARGE),
}
LARGE_TEXT = {"data": b"a,b\n" * (LARGE // 4), "content_type": "text/csv"}


class Broken(BytesIO):
    """A stream that ends with an error, as after a connection reset."""

    def read(self, size=-1, /):
        data = super().read(size)
        if not data:
            raise ConnectionResetError
        return data


class Dripping(BytesIO):
    """A stream that returns less than requested."""

    def read(self, size=-1, /):
        return super().read(700 if size is None or size < 0 else min(size, 700))

    def readline(self, size=-1, /):
        return super().readline(3 if size is None or size < 0 else min(size, 3))


def half(sent, stream=BytesIO):
    """The arguments of a request whose first half alone arrives."""
    data = sent["data"]
    return {**sent, "CONTENT_LENGTH": str(len(data)), "wsgi.input": stream(data[: len(data) // 2])}


def digest(request):
    return "sha-256"


def refuses_half(alice, sent, stream=BytesIO, **options):
    """Check that half of a body is refused without an effect, and that the retry with the whole body runs."""
    cut = alice.post(key="k", **half(sent, stream), **options)
    assert problem_code(cut) == "idempotency_payload_invalid", cut.content
    assert effects() == 0
    assert all(status == Status.RECOVERABLE for status, _ in records())
    whole = alice.post(key="k", **{**sent, "wsgi.input": BytesIO(sent["data"])}, **options)
    assert (whole.status_code, whole["Idempotency-Status"]) == (201, "executed"), whole.content
    assert effects() == 1


#: Ways for a handler to read the body.
READS = {
    "body": lambda http: http.body,
    "form": lambda http: [http.POST, http.FILES],
    "pieces": lambda http: [*iter(lambda: http.read(1000), b"")],
    "lines": lambda http: [*http],
    "all of the server's stream": lambda http: http.environ["wsgi.input"].read(None),
    "the server's stream": lambda http: http.environ["wsgi.input"].read(),
    "pieces of the server's stream": lambda http: [*iter(lambda: http.environ["wsgi.input"].read(900), b"")],
    "lines of the server's stream": lambda http: http.environ["wsgi.input"].readlines(),
    "a line of the server's stream": lambda http: http.environ["wsgi.input"].readline(),
}


def reading(read):
    """A handler that reads its request in one of these ways, then works."""

    def handler(request):
        read(getattr(request, "_request", request))
        return work(request)

    return handler


@pytest.mark.failure_87
@pytest.mark.parametrize("sent", SENT.values(), ids=SENT)
@policies
def test_half_a_body_is_refused_before_its_key_is_claimed(alice, framework, sent, policy):
    framework.serve(work, **policy)
    refuses_half(alice, sent)


@pytest.mark.parametrize("name", [name for name in READS if not name.startswith("a ")])
def test_a_handler_that_reads_half_a_body_is_rolled_back(alice, serve, name):
    Framework("plain", serve).serve(reading(READS[name]), payload=digest)
    refuses_half(alice, LARGE_TEXT if name == "pieces" else SENT["form"])


@pytest.mark.parametrize("parser", [FileUploadParser, BaseParser])
def test_half_a_body_read_by_a_drf_parser_is_refused(alice, serve, parser, settings):
    settings.FILE_UPLOAD_MAX_MEMORY_SIZE = LARGE  # otherwise only garbage collection closes the parser's file

    class Lines(parser):
        media_type = "text/csv"

        def parse(self, stream, *args, **kwargs):
            return [stream.read()] if parser is BaseParser else super().parse(stream, *args, **kwargs)

    def handler(request):
        assert request.data
        return work(request)

    def view(**policy):
        return Framework("drf", serve).view(handler, idempotent(f"tests.{len(policy)}", **policy), parsers=[Lines])

    serve(view(), **{"command/": view(payload=digest)})
    sent = {**LARGE_TEXT, "headers": {"Content-Disposition": "attachment; filename=a.csv"}}
    for url in ("/", "/command/"):
        cut = alice.post(url, key=f"k{url}", **half(sent))
        assert problem_code(cut) == "idempotency_payload_invalid"
        assert alice.post(url, key=f"k{url}", **sent).status_code == 201


@pytest.mark.parametrize("how", ["ignores the error", "answers 404", "raises 404", "answers 500", "crashes"])
def test_no_outcome_of_half_a_body_is_kept(alice, framework, how):
    def handler(request):
        answer = work(request)
        try:
            getattr(request, "_request", request).read()
        except Exception:  # noqa: BLE001 - a careless handler
            if how == "raises 404":
                raise Http404 from None
            if how == "crashes":
                raise RuntimeError from None
            return {}, {"answers 404": 404, "answers 500": 500}.get(how, 201)
        return answer

    framework.serve(handler, payload=digest)
    # The stream ends early, or breaks.
    refuses_half(alice, SENT["text"], BytesIO if framework.name == "plain" else Broken)


def test_half_a_body_read_during_rendering_is_refused(alice, serve):
    @serve
    @idempotent("tests.rendering", payload=digest)
    def view(request):
        work(request)
        template = engines["django"].from_string("{{ request.POST.b|length }}")
        return TemplateResponse(request, template, status=201)

    refuses_half(alice, SENT["form"])


@pytest.mark.parametrize(
    ("recovery", "status", "code"),
    [
        (REEXECUTE, Status.RECOVERABLE, None),
        (PARK, Status.PARKED, "idempotency_outcome_unknown"),
        (Reconcile(lambda record: Unknown()), Status.IN_PROGRESS, "idempotency_in_progress"),
    ],
    ids=["REEXECUTE", "PARK", "Reconcile"],
)
def test_half_a_body_outside_a_transaction_ends_like_a_crash(alice, serve, recovery, status, code):
    """The handler gets an error where the body ends, so it can stop before its effect. It may still have had one."""
    Framework("plain", serve).serve(reading(READS["pieces"]), payload=digest, transaction=False, recovery=recovery)
    cut = alice.post(key="k", **half(SENT["text"]))
    assert problem_code(cut) == "idempotency_payload_invalid"
    assert cut["Idempotency-Status"] == ("not-recorded" if code is None else "unknown")
    assert (effects(), records()) == (0, [(status, 1)])
    whole = alice.post(key="k", **SENT["text"])
    assert whole.status_code == 201 if code is None else problem_code(whole) == code


@pytest.mark.parametrize("act", [lambda request: request.body, lambda request: request.POST], ids=["body", "form"])
@pytest.mark.parametrize("policy", [{}, {"payload": digest}, {"key": FromForm("a")}], ids=["", "command", "key"])
def test_half_a_body_read_by_a_middleware_is_refused(alice, serve, act, policy):
    serve(after(act, idempotent("tests.read", **policy)(plain_answer)))
    cut = alice.post(key=None if "key" in policy else "k", **half(SENT["form"]))
    assert problem_code(cut) == "idempotency_payload_invalid"
    assert (effects(), records()) == (0, [])


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("place", ["form", "multipart", "json"])
def test_a_body_cut_off_before_its_key_is_refused(alice, serve, place, required):
    sent = {
        "form": {"data": b"a=%s&key=k" % (b"1" * SMALL), "content_type": FORM},
        "multipart": multipart({"a": "1" * SMALL, "key": "k"}),
        "json": {"data": b'{"a": "%s", "key": "k"}' % (b"1" * SMALL)},
    }[place]
    source = FromJSON("key") if place == "json" else FromForm("key")
    serve(idempotent("tests.key", key=source, key_required=required)(plain_answer))
    assert problem_code(alice.post(**half(sent))) == "idempotency_payload_invalid"
    assert (effects(), records()) == (0, [])
    assert alice.post(**sent).status_code == 201


def unpack(request):
    request._body = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(request.body)


def unpack_stream(request):
    unpack(request)
    request._stream = BytesIO(request._body)


def unpack_and_correct_the_length(request):
    unpack_stream(request)
    request.META["CONTENT_LENGTH"] = str(len(request._body))


@pytest.mark.parametrize("act", [unpack, unpack_stream, unpack_and_correct_the_length])
@pytest.mark.parametrize("size", [1, SMALL], ids=["longer compressed", "shorter compressed"])
def test_half_a_body_that_a_middleware_would_decompress_is_refused(alice, framework, serve, act, size):
    def handler(request):
        work(request)
        return {"length": len(getattr(request, "_request", request).body)}, 201

    serve(after(act, framework.view(handler, idempotent("tests.unpacked"))))
    plain = b'{"a": "%s"}' % (b"1" * size)
    sent = {"data": gzip.compress(plain), "headers": {"Content-Encoding": "gzip"}}
    refuses_half(alice, sent)
    assert alice.post(key="k", **sent).json() == {"length": len(plain)}


@pytest.mark.parametrize("length", [0, 10])
def test_a_connection_reset_is_refused_like_half_a_body(alice, framework, length):
    framework.serve(work)
    refuses_half(alice, SENT["text"], lambda arrived: Broken(arrived[:length]))


@pytest.mark.parametrize("ignores_it", [False, True])
def test_a_cut_off_chunked_body_read_from_the_server_is_refused(alice, framework, ignores_it):
    """Django treats a chunked body as empty."""

    def handler(request):
        http = getattr(request, "_request", request)
        with suppress(Exception) if ignores_it else nullcontext():
            http.environ["wsgi.input"].read()
        return work(request)

    framework.serve(handler, payload=digest)
    chunked = {"CONTENT_LENGTH": "", "HTTP_TRANSFER_ENCODING": "chunked", "content_type": "text/csv"}
    cut = alice.post(key="k", **chunked, **{"wsgi.input": Broken(b"")})
    assert problem_code(cut) == "idempotency_payload_invalid"
    assert (effects(), records()) == (0, [(Status.RECOVERABLE, 1)])
    whole = alice.post(key="k", **chunked, **{"wsgi.input": BytesIO(b"a,b")})
    assert (whole.status_code, effects()) == (201, 1)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_server_may_deliver_a_body_in_small_pieces(alice, serve, read):
    seen = []
    Framework("plain", serve).serve(reading(lambda http: seen.append(read(http))), payload=digest)
    for stream in (BytesIO, Dripping):
        first = alice.post(key=stream.__name__, **{**SENT["text"], "wsgi.input": stream(SENT["text"]["data"])})
        assert first.status_code == 201
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "read", [lambda http: None, lambda http: http.read(10), READS["a line of the server's stream"]]
)
def test_a_handler_that_does_not_read_the_missing_half_is_not_refused(alice, serve, read):
    """Its effect doesn't depend on the rest, and waiting for the rest would keep its transaction open."""
    Framework("plain", serve).serve(reading(read), payload=digest)
    first = alice.post(key="k", **half(SENT["text"]))
    assert (first.status_code, effects()) == (201, 1)
    assert alice.post(key="k", **SENT["text"])["Idempotency-Status"] == "replayed"


class Ending(Broken):
    """A stream that ends within a requested piece."""

    def read(self, size=-1, /):
        return super().read(min(size, 700))


@pytest.mark.parametrize("stream", [BytesIO, Ending, Broken])
def test_an_unprotected_request_reads_half_a_body_as_without_this_package(alice, serve, stream):
    def read(request):
        seen = []
        try:
            while data := request.read(100_000):
                seen.append(len(data))
        except UnreadablePostError:  # Django's error for a connection that was reset
            return JsonResponse({"seen": seen, "reset": True})
        return JsonResponse({"seen": seen, "reset": False})

    serve(idempotent("tests.optional", key_required=False)(read), **{"twin/": read})
    for url, key in (("/", None), ("/twin/", None), ("/twin/", "k")):
        found = alice.post(url, key=key, **half(SENT["text"], stream)).json()
        assert (sum(found["seen"]), found["reset"]) == (len(SENT["text"]["data"]) // 2, stream is not BytesIO)


def streams_that_views_get(alice, serve, monkeypatch, sent, **policy):
    """The stream of each of two views, the first of which is protected if the request has a key."""
    monkeypatch.setattr(registry, "_with_key", set())
    found = []

    def keep(request):
        found.append(request.environ["wsgi.input"])
        return plain_answer(request)

    serve(idempotent("tests.stream", key_required=False, **policy)(keep), **{"twin/": keep})
    for url in ("/", "/twin/"):
        assert alice.post(url, **sent).status_code == 201
    return found


@pytest.mark.parametrize(
    ("policy", "headers", "is_watched"),
    [
        ({}, {}, False),
        ({}, {"Idempotency-Key": "k"}, True),
        ({"key": FromHeader("X-Event")}, {}, False),
        ({"key": FromHeader("X-Event")}, {"X-Event": "k"}, True),
        ({"key": FromForm("a")}, {}, True),
        ({"key": lambda request: None}, {}, True),
    ],
)
def test_only_a_stream_in_which_a_key_may_come_is_watched(alice, serve, monkeypatch, policy, headers, is_watched):
    stream = BytesIO(b"a=1")
    sent = {"data": b"a=1", "content_type": FORM, "headers": headers, "wsgi.input": stream}
    found = streams_that_views_get(alice, serve, monkeypatch, sent, **policy)
    assert [each is stream for each in found] == [not is_watched] * 2


def test_a_body_is_watched_if_the_urls_can_not_be_loaded(settings):
    settings.ROOT_URLCONF = "no.module"
    environ = {"CONTENT_LENGTH": "3", "wsgi.input": BytesIO(b"a=1")}
    watch_body(environ)
    assert environ[BODY_STREAM] is environ["wsgi.input"]


def test_a_watched_stream_has_the_servers_other_methods(tmp_path):
    file = tmp_path / "body"
    file.write_bytes(b"a=1\nb=2\n")
    with file.open("rb") as stream:
        watched = BodyStream(stream, 8)
        assert (watched.fileno(), watched.peek(3)[:3], watched.closed) == (stream.fileno(), b"a=1", False)
        assert not hasattr(watched, "another")
        buffer = bytearray(6)
        assert (watched.readinto(buffer), bytes(buffer)) == (6, b"a=1\nb=")
        with watched:
            assert (watched.read(100), watched.read(), watched.readinto(buffer)) == (b"2\n", b"", 0)


def test_half_a_body_read_into_a_buffer_is_refused(alice, serve):
    read = lambda http: http.environ["wsgi.input"].readinto(bytearray(LARGE))  # noqa: E731
    Framework("plain", serve).serve(reading(read), payload=digest)
    refuses_half(alice, SENT["form"])


def test_code_above_the_protection_may_continue_reading(alice, serve):
    protected = idempotent("tests.below", payload=digest)(plain_answer)

    def view(request):
        response = protected(request)
        response["Length"] = str(len(request.read()))
        return response

    serve(after(lambda request: None, view))
    first = alice.post(key="k", **half(SENT["text"]))
    assert (first.status_code, first["Length"]) == (201, str(len(SENT["text"]["data"]) // 2))


def test_half_a_body_is_refused_after_an_inner_operation_too(alice, serve):
    inner = idempotent("tests.inner", payload=digest)(lambda request: JsonResponse({}))

    @serve
    @idempotent("tests.outer", payload=digest, transaction=False, recovery=REEXECUTE)
    def outer(request):
        inner(request)
        request.read()
        return plain_answer(request)

    assert problem_code(alice.post(key="k", **half(SENT["text"]))) == "idempotency_payload_invalid"
    assert effects() == 0


def test_a_retry_with_half_a_body_is_replayed_if_the_body_is_not_read(alice, serve):
    Framework("plain", serve).serve(reading(READS["body"]), payload=digest)
    assert alice.post(key="k", **SENT["text"]).status_code == 201
    assert alice.post(key="k", **half(SENT["text"]))["Idempotency-Status"] == "replayed"
    assert effects() == 1
