"""Bodies to records and back, without a database. ``tests/http`` checks which parts of a response are kept."""

import json

import pytest
from django.http import HttpResponse
from hypothesis import example, given
from hypothesis import strategies as st

from idempotency import Operation, bodies
from idempotency.bodies import ENVELOPE, decode_body, encode_body
from idempotency.exceptions import OutcomeUnreadableError
from idempotency.http.adapter import response_of
from idempotency.outcome import Outcome, outcome_of

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
def test_every_body_is_restored_byte_for_byte_from_its_json_text(content, content_type):
    text = encode_body(content, content_type)
    json.loads(text)  # a json column would validate it
    assert "\x00" not in text
    assert decode_body(text) == content


@pytest.mark.parametrize(
    ("text", "in_envelope"),
    [
        ('[[{"a": "[[[["}]]', False),
        ('[[[{"a": "]]]]"}]]]', True),
        ('[["\\"[[[[", []]]', False),
        ('[[[{"ü": "ü]]]]"}]]]', True),
        ("[[], [], [], []]", False),
    ],
)
def test_json_too_deep_for_a_database_is_stored_in_an_envelope(monkeypatch, text, in_envelope):
    monkeypatch.setattr(bodies, "MAX_DEPTH", 3)
    encoded = encode_body(text.encode(), "application/json")
    assert (encoded.startswith(ENVELOPE), decode_body(encoded)) == (in_envelope, text.encode())


def test_a_response_without_content_type_or_body_is_replayed_unchanged():
    response = HttpResponse(status=204)
    del response["Content-Type"]
    operation = Operation.declare("tests.outcome")
    for kept in (outcome_of(response, operation.policy), Outcome(status=204)):
        replay = response_of(kept)
        assert (replay.status_code, replay.content, replay.has_header("Content-Type")) == (204, b"", False)


def test_an_envelope_that_is_nested_too_deeply_is_unreadable():
    with pytest.raises(OutcomeUnreadableError):
        response_of(Outcome(201, body=f"{ENVELOPE}{100_000 * '['}{100_000 * ']'}}}"))
