"""Replays byte for byte: bodies of every kind, and what is rendered late."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest
from django.http import HttpResponse, JsonResponse
from django.template import engines
from django.template.response import SimpleTemplateResponse
from rest_framework.renderers import JSONRenderer
from rest_framework.response import Response

from idempotency import idempotent
from idempotency.models import IdempotencyRecord
from testproject.models import Charge, Transfer
from tests.http.callers import Caller, assert_nothing_kept, replayed
from tests.http.serving import Serve, drf_view, serve_answer
from tests.http.views import drf_answer

pytestmark = pytest.mark.django_db(transaction=True)


# Bodies

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
@pytest.mark.parametrize("depth", [10, 200, 990, 2_000, 4_000, 8_000, 16_000, 50_000, 100_000])
def test_json_of_any_depth_replays(alice: Caller, serve: Serve, depth: int) -> None:
    """Each parser gives up at a depth of its own: Python's, and the database's where it checks what it is given."""
    content = b"[" * depth + b"]" * depth
    serve_answer(serve, lambda: HttpResponse(content, content_type="application/json"))
    first, _ = replayed(alice)
    assert (first.status_code, first.content) == (200, content)


@pytest.mark.scenario(15)
@pytest.mark.failure_mode(38)
@pytest.mark.parametrize("make", BODIES.values(), ids=BODIES)
def test_a_body_of_any_kind_replays_byte_for_byte(alice: Caller, serve: Serve, make: Callable[[], Any]) -> None:
    serve_answer(serve, make)
    first, replay = replayed(alice)
    unprotected = make()
    assert (first.status_code, first.content) == (unprotected.status_code, unprotected.content)
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
    compressed = [alice.post(key="k", headers={"Accept-Encoding": "gzip"}) for _ in range(2)]
    plain = alice.post(key="k")
    for answer in compressed:
        assert answer["Content-Encoding"] == "gzip"
        assert gzip.decompress(answer.content) == plain.content


# Failure mode 32: responses that are rendered late


def template(text: str, **context: Any) -> SimpleTemplateResponse:
    return SimpleTemplateResponse(engines["django"].from_string(text), context, status=201)  # type: ignore[arg-type]


@pytest.mark.failure_mode(32)
def test_a_template_is_rendered_within_the_transaction_and_recorded_as_rendered(alice: Caller, serve: Serve) -> None:
    serve_answer(serve, lambda: template("{{ count }} transfers", count=Transfer.objects.count))
    first, _ = replayed(alice)
    assert first.content == b"1 transfers"


@pytest.mark.failure_mode(32)
def test_a_rendering_that_fails_undoes_the_run(alice: Caller, serve: Serve) -> None:
    def fail() -> None:
        raise ValueError

    serve_answer(serve, lambda: template("{{ fail }}", fail=fail))
    assert_nothing_kept(alice, 500)


@pytest.mark.failure_mode(32)
def test_a_drf_response_is_rendered_once_within_the_transaction(alice: Caller, serve: Serve) -> None:
    rendered: list[Any] = []

    class CountingRenderer(JSONRenderer):
        def render(self, data: Any, *args: Any, **kwargs: Any) -> Any:
            rendered.append(Transfer.objects.count())
            return super().render(data, *args, **kwargs)

    serve(drf_view(idempotent("tests.rendered")(drf_answer), renderers=[CountingRenderer]))
    first, replay = replayed(alice)
    assert rendered == [1]
    for header in ("Content-Type", "Location", "Allow"):
        assert first[header] == replay[header]


@pytest.mark.failure_mode(32)
def test_a_drf_replay_comes_in_the_form_of_the_first_answer(alice: Caller, serve: Serve) -> None:
    """The recorded bytes are what was sent. Content negotiation has no say in a replay."""
    serve_answer(serve, lambda: Response({"a": 1}), framework="drf")
    first = alice.post(key="k", headers={"Accept": "application/json; indent=4"})
    replay = alice.post(key="k", headers={"Accept": "application/json"})
    assert replay.content == first.content == b'{\n    "a": 1\n}'


# A validator that looks at what the first run has changed


@pytest.mark.scenario(17)
@pytest.mark.failure_mode(43)
def test_a_create_with_a_unique_field_replays_its_201(alice: Caller, bob: Caller) -> None:
    payload = {"amount": 1000, "currency": "usd", "reference": "unique", "label": "order 1"}
    first, replay = replayed(alice, "/charges/", payload, wrote=0)
    assert first.status_code == 201
    assert replay["Location"] == first["Location"]
    assert Charge.objects.count() == 1
    # To a new operation the validator speaks as ever, and its no is recorded.
    refused, _ = replayed(bob, "/charges/", payload, wrote=0)
    assert refused.status_code == 400
    assert "reference" in json.loads(refused.content)
    Charge.objects.all().delete()
    assert bob.post("/charges/", payload, key="k").status_code == 400
    assert bob.post("/charges/", payload, key="k2").status_code == 201
    assert Charge.objects.count() == 1
