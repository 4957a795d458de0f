"""JSON is read as the application reads it, or refused, or left to the caller."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idempotency.exceptions import PayloadInvalidError
from idempotency.fingerprint import Payload, parse_json
from tests.unit.fingerprint.commands import nested, of, scalars, typed


@given(nested(scalars))
def test_json_is_read_as_the_application_reads_it(value: object) -> None:
    for ascii_only in (True, False):
        body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        try:
            expected = json.loads(body.decode())
        except UnicodeDecodeError:
            with pytest.raises(UnicodeDecodeError):
                parse_json(body)
        else:
            assert typed(parse_json(body)) == typed(expected)


def test_spacing_escapes_and_order_do_not_count() -> None:
    one = parse_json(b'{"a": 1, "b": "\\u00e9", "c": 1.50}')
    other = parse_json('{"c":15e-1,\n"b":"é","a":1}'.encode())
    assert of(one) == of(other)


@pytest.mark.parametrize(
    "body",
    [
        b"NaN",
        b"[Infinity]",
        b'{"a": -Infinity}',
        b"1e400",
        b"[-1e400]",
        b"1" * 5_000,
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    ],
    ids=lambda body: body[:12].decode(),
)
def test_json_that_python_cannot_hold_is_refused(body: bytes) -> None:
    with pytest.raises(PayloadInvalidError):
        parse_json(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"{'a': 1}",
        b'{"a": 1} x',
        b"\xff",
        b'"\xed\xa0\x80"',
        b"\xef\xbb\xbf{}",
        b"\x00",
        b'"\x00"',
        b"01",
    ],
)
def test_what_is_not_json_is_left_to_the_caller(body: bytes) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_json(body)
    assert not isinstance(caught.value, PayloadInvalidError)


def test_repeated_names_never_equal_what_a_parser_could_take_them_for() -> None:
    twice = parse_json(b'{"a": 1, "a": 2}')
    texts = [
        b'{"a": 1}',
        b'{"a": 2}',
        b'{"a": 2, "a": 1}',
        b'{"a": 1, "a": 2, "a": 2}',
        b'[["a", 1], ["a", 2]]',
        b'{"a": [1, 2]}',
    ]
    assert of(twice) not in {of(parse_json(text)) for text in texts}
    assert of(twice) == of(parse_json(b'{"a":1,"a":2}'))
    assert of(parse_json(b'[{"b": {"a": 1, "a": 2}}]')) != of(parse_json(b'[{"b": {"a": 2}}]'))


@given(st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_body_is_parsed_refused_or_left(body: bytes) -> None:
    try:
        command = parse_json(body)
    except PayloadInvalidError:
        return
    except ValueError:
        command = body
    assert Payload(command).matches(of(command))
