"""Responses to records and back, without a database."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from django.http import HttpResponse, StreamingHttpResponse
from hypothesis import example, given
from hypothesis import strategies as st

from idempotency import Operation
from idempotency.exceptions import OutcomeUnreadableError, UnrecordableResponseError
from idempotency.operation import registry
from idempotency.outcome import ENVELOPE, Outcome, decode_body, encode_body, outcome_of, response_of


@pytest.fixture
def operation() -> Iterator[Operation]:
    yield Operation("unit.outcome", max_body=100)
    registry.discard("unit.outcome")


TYPES = st.sampled_from(
    ["application/json", "application/json; charset=utf-8", "Application/Problem+JSON", "text/html", "", "image/png"]
)


@given(content=st.binary(max_size=200), content_type=TYPES)
@example(content=b"", content_type="application/json")
@example(content=b'{"a": NaN}', content_type="application/json")
@example(content=b"\xff\xfe", content_type="application/json")
@example(content=b'\xef\xbb\xbf{"a": 1}', content_type="application/json")
@example(content=b'{"b":1,  "a":1.0, "a":2}\n', content_type="application/json")
@example(content=ENVELOPE.encode() + b' {"encoding": "utf-8", "data": "x"}}', content_type="application/json")
@example(content=b'"\\u0000\\ud800"', content_type="application/json")
@example(content=b"nul\x00", content_type="text/html")
@example(content=b"[" * 5000 + b"]" * 5000, content_type="application/json")
@example(content=b"9" * 5000, content_type="application/json")
def test_every_body_comes_back_byte_for_byte_through_json_text(content: bytes, content_type: str) -> None:
    text = encode_body(content, content_type)
    json.loads(text)  # what a json column would check
    assert "\x00" not in text
    assert decode_body(text) == content


def test_json_is_kept_as_the_text_that_was_sent() -> None:
    assert encode_body(b'{"b": 1.0,"a":[ ]}', "application/json") == '{"b": 1.0,"a":[ ]}'


def test_only_listed_headers_are_kept_and_credentials_never(operation: Operation) -> None:
    response = HttpResponse(b"{}", content_type="application/json", status=201)
    for name in ("Location", "X-Request-Id", "Date", "Set-Cookie", "WWW-Authenticate", "ETag"):
        response[name] = "/x"
    response.set_cookie("session", "secret")
    assert [name for name, _ in outcome_of(response, operation).headers] == ["Content-Type", "Location", "ETag"]
    greedy = Operation("unit.greedy", headers=["Set-Cookie", "Authorization", "X-Request-Id"])
    assert [name for name, _ in outcome_of(response, greedy).headers] == ["Content-Type", "X-Request-Id"]
    registry.discard("unit.greedy")


def test_a_response_without_a_content_type_is_replayed_without_one(operation: Operation) -> None:
    response = HttpResponse(status=204)
    del response["Content-Type"]
    replay = response_of(outcome_of(response, operation))
    assert (replay.status_code, replay.content, replay.has_header("Content-Type")) == (204, b"", False)


@pytest.mark.failure_mode(31)
def test_a_stream_is_refused_by_name_with_the_remedy(operation: Operation) -> None:
    with pytest.raises(UnrecordableResponseError, match=r"'unit\.outcome'.*rebuild="):
        outcome_of(StreamingHttpResponse(iter([b"x"])), operation)


@pytest.mark.failure_mode(37)
def test_a_body_over_the_cap_is_refused_by_name_with_the_remedy(operation: Operation) -> None:
    assert outcome_of(HttpResponse(b"x" * 100), operation).body
    with pytest.raises(UnrecordableResponseError, match=r"'unit\.outcome'.*101 bytes.*max_body"):
        outcome_of(HttpResponse(b"x" * 101), operation)


def test_a_reference_needs_somebody_who_can_read_it(operation: Operation) -> None:
    with pytest.raises(UnrecordableResponseError, match="rebuild="):
        outcome_of(HttpResponse(), operation, reference="file-1")
    rebuilding = Operation("unit.rebuilding", rebuild=lambda reference, request: HttpResponse(reference))
    outcome = outcome_of(StreamingHttpResponse(iter([b"x"]), status=201), rebuilding, reference="file-1")
    assert (outcome.status, outcome.body, outcome.reference) == (201, None, "file-1")
    registry.discard("unit.rebuilding")


@pytest.mark.failure_mode(51)
@pytest.mark.parametrize(
    "damaged",
    [
        Outcome(status=200, body=ENVELOPE + " 7}"),
        Outcome(status=200, body=ENVELOPE + ' {"encoding": "base64", "data": "!"}}'),
        Outcome(status=200, body=ENVELOPE + ' {"encoding": "klingon", "data": "x"}}'),
        Outcome(status=7),
        Outcome(status=200, headers=(("Location", "a\nb"),)),
        Outcome(status=200, headers=(("Location",),)),  # type: ignore[arg-type]
    ],
)
def test_a_damaged_record_is_unreadable_and_nothing_else(damaged: Outcome) -> None:
    with pytest.raises(OutcomeUnreadableError):
        response_of(damaged)


def test_a_missing_body_is_an_empty_one() -> None:
    assert response_of(Outcome(status=204)).content == b""
