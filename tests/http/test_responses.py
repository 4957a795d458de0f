"""Replays byte for byte: statuses, headers, bodies of every kind, and the responses that can't be recorded."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template import engines
from django.template.response import SimpleTemplateResponse
from django.test import Client
from rest_framework.decorators import api_view, renderer_classes
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from idempotency import idempotent
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from testproject.models import Charge, Transfer
from tests.http.callers import Caller, Serve, effects, replayed, serve_answer
from tests.http.views import work

pytestmark = pytest.mark.django_db(transaction=True)


# 14 and failure mode 47: headers


@pytest.mark.scenario(14)
def test_a_response_that_set_a_cookie_replays_without_it(alice: Caller, serve: Serve) -> None:
    def make() -> HttpResponse:
        response = JsonResponse({"id": 1}, status=201)
        response.set_cookie("session", "secret")
        return response

    serve_answer(serve, make)
    first, replay = replayed(alice)
    assert first.cookies["session"].value == "secret"
    assert not replay.cookies
    assert replay.content == first.content
    assert "secret" not in json.dumps(list(IdempotencyRecord.objects.values("response_headers", "response_body")))


@pytest.mark.failure_mode(47)
def test_only_allow_listed_headers_come_back(alice: Caller, serve: Serve) -> None:
    kept = {
        "Location": "/transfers/1/",
        "ETag": '"abc"',
        "Content-Language": "de",
        "Cache-Control": "no-store",
        "Content-Disposition": 'attachment; filename="a.csv"',
        "Retry-After": "7",
        "Vary": "Accept-Language",
        "Link": '</a>; rel="next", </b>; rel="last"',
        "Content-Type": "application/vnd.example+json",
    }
    dropped = {
        "Authorization": "Bearer secret",
        "Proxy-Authorization": "Basic secret",
        "WWW-Authenticate": "Token",
        "Date": "Thu, 01 Jan 1970 00:00:00 GMT",
        "X-Request-Id": "1",
        "Access-Control-Allow-Origin": "https://shop.example",
    }
    serve_answer(serve, lambda: HttpResponse(b"{}", headers={**kept, **dropped}))
    first, replay = replayed(alice)
    for header, value in kept.items():
        assert first[header] == replay[header] == value
    for header, value in dropped.items():
        assert first[header] == value
        assert header not in replay
    assert "Content-Length" in replay  # the middleware's, made anew


@pytest.mark.failure_mode(47)
@pytest.mark.parametrize("by", ["policy", "setting"])
def test_credentials_are_never_recorded_whatever_the_allow_list_says(
    alice: Caller, serve: Serve, settings: Any, by: str
) -> None:
    headers = ["X-Receipt", "set-cookie", "Authorization", "WWW-Authenticate"]

    def make() -> HttpResponse:
        response = HttpResponse(
            b"", headers={"X-Receipt": "7", "Authorization": "s", "WWW-Authenticate": "s", "Location": "/"}
        )
        response["Set-Cookie"] = "a=s"
        return response

    if by == "setting":
        settings.IDEMPOTENCY = {"RECORDED_HEADERS": headers}
        serve_answer(serve, make)
    else:
        serve_answer(serve, make, headers=headers)
    _, replay = replayed(alice)
    assert replay["X-Receipt"] == "7"
    for header in ("Set-Cookie", "Authorization", "WWW-Authenticate", "Location"):
        assert header not in replay


# 15 and failure mode 38: bodies

BODIES: dict[str, Callable[[], Any]] = {
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
    "deep json": lambda: HttpResponse(b"[" * 20_000 + b"]" * 20_000, content_type="application/json"),
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


def _without_content_type(response: HttpResponse) -> HttpResponse:
    del response["Content-Type"]
    return response


@pytest.mark.scenario(15)
def test_json_of_any_depth_replays(alice: Caller, serve: Serve) -> None:
    """Each parser gives up at a depth of its own: Python's, and the database's where it checks what it is given."""
    depths = [10, 200, 990, 2_000, 4_000, 8_000, 16_000, 50_000, 100_000]

    @idempotent("tests.deep")
    def view(request: HttpRequest) -> HttpResponse:
        work(request)
        depth = int(request.GET["depth"])
        return HttpResponse(b"[" * depth + b"]" * depth, content_type="application/json")

    serve(view)
    for count, depth in enumerate(depths, start=1):
        answers = [alice.post(f"/?depth={depth}", key=str(depth)) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200], depth
        assert answers[1].content == answers[0].content == b"[" * depth + b"]" * depth
        assert effects() == count


@pytest.mark.scenario(15)
@pytest.mark.parametrize("body", BODIES)
def test_a_body_of_any_kind_replays_byte_for_byte(alice: Caller, serve: Serve, body: str) -> None:
    serve_answer(serve, BODIES[body])
    first, replay = replayed(alice)
    unprotected = BODIES[body]()
    assert first.status_code == replay.status_code == unprotected.status_code
    assert first.content == replay.content == unprotected.content
    for header in ("Content-Type", "Content-Encoding"):
        assert first.get(header) == replay.get(header) == unprotected.get(header)


@pytest.mark.scenario(15)
def test_a_json_body_is_kept_as_the_text_that_it_is(alice: Caller, serve: Serve) -> None:
    serve_answer(serve, BODIES["json"])
    first, _ = replayed(alice)
    assert IdempotencyRecord.objects.get().response_body == first.content.decode()


@pytest.mark.failure_mode(38)
def test_gzip_of_a_middleware_is_made_anew(alice: Caller, serve: Serve, settings: Any) -> None:
    settings.MIDDLEWARE = ["django.middleware.gzip.GZipMiddleware", *settings.MIDDLEWARE]
    serve_answer(serve, lambda: JsonResponse({"text": "a" * 1000}))
    first, replay = replayed(alice, headers={"Accept-Encoding": "gzip"})
    assert first["Content-Encoding"] == replay["Content-Encoding"] == "gzip"
    assert gzip.decompress(first.content) == gzip.decompress(replay.content)
    assert json.loads(alice.post(key="k").content) == {"text": "a" * 1000}


# Failure mode 32: responses that are rendered late


@pytest.mark.failure_mode(32)
def test_a_template_is_rendered_within_the_transaction_and_recorded_as_rendered(alice: Caller, serve: Serve) -> None:
    template = engines["django"].from_string("{{ count }} transfers")

    def make() -> SimpleTemplateResponse:
        return SimpleTemplateResponse(template, {"count": lambda: Transfer.objects.count()}, status=201)  # type: ignore[arg-type]

    serve_answer(serve, make)
    first, replay = replayed(alice)
    assert first.content == replay.content == b"1 transfers"


@pytest.mark.failure_mode(32)
def test_a_rendering_that_fails_undoes_the_run(alice: Caller, serve: Serve) -> None:
    def fail() -> None:
        raise ValueError

    def make() -> SimpleTemplateResponse:
        return SimpleTemplateResponse(engines["django"].from_string("{{ fail }}"), {"fail": fail})  # type: ignore[arg-type]

    serve_answer(serve, make)
    assert alice.post(key="k").status_code == 500
    assert effects() == 0
    assert IdempotencyRecord.objects.get().status == Status.RECOVERABLE


@pytest.mark.failure_mode(32)
def test_a_drf_response_is_rendered_once_within_the_transaction(alice: Caller, serve: Serve) -> None:
    rendered: list[Any] = []

    class CountingRenderer(JSONRenderer):
        def render(self, data: Any, *args: Any, **kwargs: Any) -> Any:
            rendered.append(Transfer.objects.count())
            return super().render(data, *args, **kwargs)

    @api_view(["POST"])
    @renderer_classes([CountingRenderer])
    @idempotent("tests.rendered")
    def view(request: Request) -> Response:
        work(request)
        return Response({"id": 1}, status=201, headers={"Location": "/1/"})

    serve(view)
    first, replay = replayed(alice)
    assert rendered == [1]
    for header in ("Content-Type", "Location", "Allow"):
        assert first[header] == replay[header]


@pytest.mark.failure_mode(32)
def test_a_drf_replay_comes_in_the_form_of_the_first_answer(alice: Caller, serve: Serve) -> None:
    """The recorded bytes are what was sent. Content negotiation has no say in a replay."""

    @api_view(["POST"])
    @idempotent("tests.negotiated")
    def view(request: Request) -> Response:
        work(request)
        return Response({"a": 1})

    serve(view)
    first = alice.post(key="k", headers={"Accept": "application/json; indent=4"})
    replay = alice.post(key="k", headers={"Accept": "application/json"})
    assert replay.content == first.content == b'{\n    "a": 1\n}'
    assert effects() == 1


# 17 and failure mode 43: validators that look at what the first run has changed


@pytest.mark.scenario(17)
def test_a_create_with_a_unique_field_replays_its_201(alice: Caller, bob: Caller) -> None:
    payload = {"amount": 1000, "currency": "usd", "reference": "unique", "label": "order 1"}
    first = alice.post("/charges/", payload, key="k")
    assert first.status_code == 201
    replay = alice.post("/charges/", payload, key="k")
    assert (replay.status_code, replay.content) == (201, first.content)
    assert replay["Location"] == first["Location"]
    assert Charge.objects.count() == 1
    # To a new operation the validator speaks as ever, and its no is recorded.
    for _ in range(2):
        refused = bob.post("/charges/", payload, key="k")
        assert refused.status_code == 400
        assert "reference" in json.loads(refused.content)
    Charge.objects.all().delete()
    assert bob.post("/charges/", payload, key="k").status_code == 400
    assert bob.post("/charges/", payload, key="k2").status_code == 201
    assert Charge.objects.count() == 1


@pytest.mark.scenario(13)
def test_a_declined_charge_stays_declined(alice: Caller) -> None:
    payload = {"amount": 1000, "currency": "usd", "source": "declined"}
    first = alice.post("/charges/", payload, key="k")
    assert first.status_code == 402
    replay = alice.post("/charges/", payload, key="k")
    assert (replay.status_code, replay.content) == (402, first.content)
    assert replay["Idempotency-Replayed"] == "true"


@pytest.mark.scenario(8)
@pytest.mark.parametrize(
    ("url", "payload"),
    [
        ("/charges/", {"amount": 1, "currency": "usd"}),
        ("/transfers/", {"amount": 1, "recipient": "carol"}),
        ("/notifications/", {"recipient": "carol", "message": "hello"}),
    ],
)
def test_the_sample_projects_endpoints_replay(alice: Caller, url: str, payload: Any) -> None:
    first = alice.post(url, payload, key="k")
    assert first.status_code == 201
    assert alice.post(url, payload, key="k").content == first.content
    assert alice.post(url, {**payload, "label": "x"}, key="k").status_code == 422
    assert Client().post(url, payload, content_type="application/json").status_code == 401
