"""Replays are byte for byte. An outcome that can't be recorded is refused, and an unreadable one never runs again."""

import gzip
import io
from functools import partial

import pytest
from django.http import FileResponse, HttpResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import SimpleTemplateResponse
from rest_framework.renderers import JSONRenderer

from idempotency import idempotent, require_claim
from idempotency.models import IdempotencyRecord
from testproject.models import Charge, Transfer
from tests.http.callers import assert_nothing_kept, assert_refused, effects, problem_code, replayed
from tests.http.serving import drf_view, serve_answer
from tests.http.views import drf_answer, work

pytestmark = pytest.mark.django_db(transaction=True)


BODIES = {
    "204": lambda: HttpResponse(status=204),
    "empty": lambda: HttpResponse(b"", status=201),
    "empty without a content type": lambda: _without_content_type(HttpResponse(b"")),
    "html": lambda: HttpResponse("<p>grüß</p>", status=201),
    "charset": lambda: HttpResponse("<p>grüß</p>", content_type="text/html; charset=iso-8859-1"),
    "json": lambda: HttpResponse(b'{"b": 1,  "a": [1.50, 1e2, "\\u00fc"],\n"b": 2}', content_type="application/json"),
    "json with a charset": lambda: HttpResponse(b'{"a": 1}', content_type="application/json; charset=utf-8"),
    "json in latin-1": lambda: HttpResponse(b'{"a": "\xfc"}', content_type="application/json; charset=latin-1"),
    "json with NaN": lambda: HttpResponse(b'{"a": NaN}', content_type="application/json"),
    "json with an escaped NUL": lambda: HttpResponse(b'{"a": "\\u0000"}', content_type="application/json"),
    "json with half a surrogate pair": lambda: HttpResponse(b'{"a": "\\ud800"}', content_type="application/json"),
    "json with a byte order mark": lambda: HttpResponse(b"\xef\xbb\xbf{}", content_type="application/json"),
    "json with an integer of 5000 digits": lambda: HttpResponse(b"9" * 5000, content_type="application/json"),
    "json with a number beyond any float": lambda: HttpResponse(b"[1e999999]", content_type="application/json"),
    "json scalar": lambda: HttpResponse(b"null", content_type="application/json"),
    "json between white space": lambda: HttpResponse(b" \n{}\t ", content_type="application/json"),
    "problem json": lambda: HttpResponse(b'{"title": "x"}', content_type="application/problem+json", status=400),
    "malformed json": lambda: HttpResponse(b"{oops", content_type="application/json"),
    "an envelope of ours": lambda: HttpResponse(
        b'{"$idempotency-envelope": {"encoding": "utf-8", "data": "forged"}}', content_type="application/json"
    ),
    "bytes": lambda: HttpResponse(bytes(range(256)), content_type="application/octet-stream"),
    "text with NUL": lambda: HttpResponse(b"a\x00b", content_type="text/plain"),
    "gzip": lambda: HttpResponse(
        gzip.compress(b'{"a": 1}', mtime=0), content_type="application/json", headers={"Content-Encoding": "gzip"}
    ),
    "chunks": lambda: HttpResponse([b'{"a"', b": 1}"], content_type="application/json"),
    "an odd reason": lambda: HttpResponse(b"", status=299, reason="Fine"),
}
# Python and each database that validates JSON have different limits of depth.
for depth in (10, 200, 990, 2_000, 4_000, 8_000, 16_000, 50_000, 100_000):
    deep = b"[" * depth + b"]" * depth
    BODIES[f"json of depth {depth}"] = partial(HttpResponse, deep, content_type="application/json")


def _without_content_type(response):
    del response["Content-Type"]
    return response


@pytest.mark.scenario_15
@pytest.mark.failure_38
@pytest.mark.parametrize("make", BODIES.values(), ids=BODIES)
def test_a_body_of_any_kind_replays_byte_for_byte(alice, serve, make):
    serve_answer(serve, make)
    first, replay = replayed(alice)
    unprotected = make()
    assert (first.status_code, first.content) == (unprotected.status_code, unprotected.content)
    for header in ("Content-Type", "Content-Encoding"):
        assert first.get(header) == replay.get(header) == unprotected.get(header)


@pytest.mark.failure_32
def test_a_failed_rendering_rolls_back_the_run(alice, serve):
    template = engines["django"].from_string("{{ fail }}")
    serve_answer(serve, lambda: SimpleTemplateResponse(template, {"fail": lambda: 1 / 0}, status=201))
    assert_nothing_kept(alice, 500)


@pytest.mark.failure_32
def test_a_drf_response_is_rendered_once_within_the_transaction(alice, serve):
    rendered = []

    class CountingRenderer(JSONRenderer):
        def render(self, data, *args, **kwargs):
            rendered.append(Transfer.objects.count())
            return super().render(data, *args, **kwargs)

    serve(drf_view(idempotent("tests.rendered")(drf_answer), renderers=[CountingRenderer]))
    first, replay = replayed(alice)
    assert rendered == [1]
    for header in ("Content-Type", "Location", "Allow"):
        assert first[header] == replay[header]


@pytest.mark.scenario_17
@pytest.mark.failure_43
def test_a_create_with_a_unique_field_replays_its_201(alice, bob):
    payload = {"amount": 1000, "currency": "usd", "reference": "unique", "label": "order 1"}
    first, replay = replayed(alice, "/charges/", payload, wrote=0)
    assert first.status_code == 201
    assert replay["Location"] == first["Location"]
    assert Charge.objects.count() == 1
    # For a new operation the validator runs as usual, and its refusal is recorded.
    refused, _ = replayed(bob, "/charges/", payload, wrote=0)
    assert (refused.status_code, "reference" in refused.json()) == (400, True)
    Charge.objects.all().delete()
    assert [bob.post("/charges/", payload, key=key).status_code for key in ("k", "k2")] == [400, 201]
    assert Charge.objects.count() == 1


def stream():
    yield b"a"


async def astream():
    yield b"a"


UNRECORDABLE = {
    "stream": lambda: StreamingHttpResponse(stream()),
    "async stream": lambda: StreamingHttpResponse(astream()),
    "file": lambda: FileResponse(io.BytesIO(b"a" * 100)),
    "too large": lambda: HttpResponse(b"a" * 101),
    "too large a failure": lambda: HttpResponse(b"a" * 101, status=400),
    "a reference without rebuild=": lambda: referring("7"),
}


def referring(reference, response=None):
    require_claim().reference = reference
    return HttpResponse(status=201) if response is None else response


@pytest.mark.scenario_15
@pytest.mark.failure_31
@pytest.mark.failure_37
@pytest.mark.parametrize("kind", UNRECORDABLE)
def test_an_unrecordable_response_is_refused(alice, serve, kind, caplog):
    serve_answer(serve, UNRECORDABLE[kind], max_response_body=100)
    refused = assert_nothing_kept(alice, 500)
    assert problem_code(refused) == "idempotency_response_unrecordable"
    assert refused["Idempotency-Key"] == "k"
    assert "tests.answer" in caplog.text
    for remedy in ("101 bytes", "max_response_body") if "large" in kind else ("rebuild=",):
        assert remedy in caplog.text


@pytest.mark.failure_37
def test_the_body_limit_is_a_setting_and_a_body_at_the_limit_is_kept(alice, serve, settings):
    settings.IDEMPOTENCY = {"MAX_RESPONSE_BODY": 10}
    serve_answer(serve, lambda: HttpResponse(b"0123456789"))
    replayed(alice)
    settings.IDEMPOTENCY = {"MAX_RESPONSE_BODY": 9}
    assert problem_code(alice.post(key="k2")) == "idempotency_response_unrecordable"
    assert effects() == 1


@pytest.mark.failure_31
def test_a_transient_failure_may_be_a_stream(alice, serve):
    serve_answer(serve, lambda: StreamingHttpResponse(stream(), status=503))
    assert_nothing_kept(alice, 503)


@pytest.mark.failure_31
def test_a_stream_is_rebuilt_from_a_reference(alice, serve):
    def report(reference, request):
        return StreamingHttpResponse([f"report {reference} for {request.user}".encode()], status=201)

    @serve
    @idempotent("tests.report", rebuild=report)
    def view(request):
        work(request)
        return referring("7", report("7", request))

    answers = [alice.post(key="k") for _ in range(2)]
    found = [(answer.status_code, b"".join(answer.streaming_content)) for answer in answers]
    assert found == [(201, b"report 7 for alice")] * 2
    assert (answers[1]["Idempotency-Replayed"], effects()) == ("true", 1)
    record = IdempotencyRecord.objects.get()
    assert (record.response_reference, record.response_body) == ("7", None)


DAMAGES = [
    {"response_body": '{"$idempotency-envelope": 7}'},
    {"response_body": '{"$idempotency-envelope": {"encoding": "rot13", "data": "x"}}'},
    {"response_body": '{"$idempotency-envelope": {"encoding": "rot13"}}'},
    {"response_body": '{"$idempotency-envelope": {"encoding": "base64", "data": "%"}}'},
    {"response_status": 7},
    {"response_status": None},
    {"response_headers": [["a"]]},
    {"response_headers": [["Location", "a\nb"]]},
    {"response_headers": {"a": 1}},
    {"response_reference": "7", "response_body": None},
    {"response_headers": None},
]


@pytest.mark.failure_51
def test_an_unreadable_outcome_is_not_run_again(alice, framework, caplog):
    framework.serve()
    alice.post(key="k")
    written = IdempotencyRecord.objects.values(
        "response_status", "response_headers", "response_body", "response_reference"
    ).get()
    for damage in DAMAGES:
        caplog.clear()
        IdempotencyRecord.objects.update(**written | damage)
        for _ in range(2):
            assert_refused(alice, "idempotency_outcome_unreadable", key="k")
        assert "idempotency_outcome_unreadable" in caplog.text, damage


@pytest.mark.parametrize(
    "newer", [{"status": "sealed"}, {"request_hash": "v999:" + 64 * "0"}], ids=["status", "fingerprint"]
)
def test_a_record_of_a_newer_release_is_answered_with_retry_after(alice, framework, newer, caplog):
    framework.serve()
    alice.post(key="k")
    found = IdempotencyRecord.objects.values("status", "request_hash").get()
    IdempotencyRecord.objects.update(**newer)
    assert assert_refused(alice, "idempotency_unavailable", key="k")["Retry-After"] == "1"
    assert "Finish the deploy" in caplog.text
    IdempotencyRecord.objects.update(**found)
    assert alice.post(key="k")["Idempotency-Replayed"] == "true"


@pytest.mark.failure_98
def test_a_record_with_an_unknown_secret_is_answered_with_retry_after(alice, framework, settings, caplog):
    """A 422 would advise a new key, under which the operation would run twice."""
    framework.serve()
    settings.IDEMPOTENCY = {"FINGERPRINT_KEYS": ["blue"]}
    alice.post(data={"amount": 1}, key="k")
    settings.IDEMPOTENCY = {"FINGERPRINT_KEYS": ["green"]}
    for amount in (1, 2):
        refused = assert_refused(alice, "idempotency_unavailable", data={"amount": amount}, key="k")
        assert refused["Retry-After"] == "1"
    assert "Put the secret into SECRET_KEY_FALLBACKS or FINGERPRINT_KEYS" in caplog.text
    settings.IDEMPOTENCY = {"FINGERPRINT_KEYS": ["green", "blue"]}
    assert_refused(alice, "idempotency_key_reused", data={"amount": 2}, key="k")
    assert alice.post(data={"amount": 1}, key="k")["Idempotency-Replayed"] == "true"
