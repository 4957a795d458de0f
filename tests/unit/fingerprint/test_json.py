"""JSON is parsed as the application parses it, or refused, or returned to the caller as unparsed."""

import json
import math
import sys
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from idempotency.exceptions import PayloadInvalidError
from idempotency.identity import parsing
from idempotency.identity.parsing import MAX_CONTAINERS, MAX_DEPTH, CanonicalJSON, depth_of, parse_json
from tests.unit.fingerprint.commands import near, nested, of, scalars, typed


def text_of(body):
    parsed = parse_json(body)
    assert isinstance(parsed, CanonicalJSON)
    return parsed.text


def plain(value):
    """The value of a canonical form. Each list that represents an exact number becomes that number."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list):
        stands_for_number = len(value) == 2 and isinstance(value[0], float) and math.isnan(value[0])
        return float(value[1]) if stands_for_number else [plain(item) for item in value]
    return value


@given(nested(scalars))
def test_json_is_read_as_the_application_reads_it(value):
    for ascii_only in (True, False):
        body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        try:
            expected = json.loads(body.decode())
        except UnicodeDecodeError:
            with pytest.raises(UnicodeDecodeError):
                parse_json(body)
        else:
            assert typed(plain(json.loads(text_of(body)))) == typed(expected)


JSON = nested(scalars | near.filter(lambda value: not isinstance(value, bytes)))


@given(JSON, JSON)
def test_two_texts_have_one_fingerprint_only_if_their_values_are_equal(one, other):
    first, second = (json.dumps(value).encode("ascii") for value in (one, other))
    assert (of(parse_json(first)) == of(parse_json(second))) == (typed(one) == typed(other))


ONE_NUMBER = [
    ["0.5", "0.50", "5e-1", "0.05E1", "0.5" + "0" * 400],
    ["1", "1.0", "1e0", "10E-1", "0.1e1", "1." + "0" * 400],
    ["0", "-0", "0.0", "-0.0", "0e5", "0e999999999"],
    ["9007199254740993", "9007199254740993.0", "9.007199254740993e15"],
    ["9999999999999999", "9999999999999999.0"],
    ["10000000000000000", "1e16", "1E+16", "10000000000000000.0"],
    ["12345678901234567890", "12345678901234567890.0", "1234567890123456789e1"],
    ["9" + "0" * 49, "9e49", "90.0e48"],
    ["-1e308", "-1." + "0" * 20 + "e308"],
    ["-123456789012345e40", "-1.23456789012345000e54"],
    ["9" * 50, "9" * 50 + ".0"],
]
NUMBERS = [
    *[numbers[0] for numbers in ONE_NUMBER],
    *["9007199254740992.5", "9007199254740992", "9007199254740994", "12345678901234567891", "12345678901234567168"],
    *["0.1", "0.1000000000000000055511151231257827", "1e-400", "1e-401", "-1e-400", "1e308", "-1", "1e22", "1e23"],
    *["2.5e-310", "2.50000000000000001e-310", '"1e-400"', '[null, "1e-400"]', '"NaN"', '[["NaN"], "1e-400"]'],
    *[
        "1" + "0" * 50,
        "1e50",
        "-1" + "0" * 308,
        "1.00000000000000000000001",
        "1e-999999999",
        '"1"',
        "true",
        "[1]",
        '[null, "1e22"]',
    ],
]


def test_numbers_with_the_same_float_differ():
    assert len({of(parse_json(number.encode())) for number in NUMBERS}) == len(NUMBERS)


@pytest.mark.parametrize("numbers", ONE_NUMBER, ids=lambda numbers: numbers[0][:20])
def test_another_spelling_of_a_number_is_the_same_number(numbers):
    for around in ("%s", '{"a": [%s]}', '["a text of 12345678901234567", %s]'):
        assert len({of(parse_json((around % number).encode())) for number in numbers}) == 1


@pytest.mark.parametrize("number", ["1e308", "-1e300", "1." + "0" * 100_000, "0e999999999", "1e-999999999"])
def test_a_short_number_has_no_long_canonical_text(number):
    assert len(text_of(number.encode())) <= len('[NaN,"1E-999999999"]')


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_nesting_is_bounded(opening, closing):
    parse_json(f"{opening * MAX_DEPTH}1{closing * MAX_DEPTH}".encode())
    with pytest.raises(PayloadInvalidError, match="levels deep"):
        parse_json(f"{opening * (MAX_DEPTH + 1)}1{closing * (MAX_DEPTH + 1)}".encode())


def test_brackets_within_a_text_do_not_nest():
    parse_json(json.dumps(["[{" * MAX_DEPTH, '"[' * MAX_DEPTH, "\\[" * MAX_DEPTH]).encode())
    parse_json(json.dumps([[]] * 2 * MAX_DEPTH).encode())


def depth(value):
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@example(["\\", [[]]], True)  # a text that ends with a backslash
@given(nested(scalars | st.text('"\\\\[]{}u0')), st.booleans())
def test_the_depth_of_a_text_equals_the_depth_of_its_value(value, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert depth_of(text) == depth(value)


def test_a_text_with_too_many_containers_is_compared_by_its_bytes():
    body = b"[" + b"[]," * MAX_CONTAINERS + b"{}]"
    assert parse_json(body) == body
    assert isinstance(parse_json(b"[" + b"[]," * (MAX_CONTAINERS - 2) + b"{}]"), CanonicalJSON)


@pytest.mark.parametrize(
    ("item", "calls"),
    [
        ("[" * 150 + "]" * 150, 0),
        (json.dumps("[" * 201), 0),
        (r'"\"[\\"', 0),
        ("12345678901234567", 0),
        ("1.5", 3),  # by_value(), is_short_integer() and decimal_text()
        ('{"name": 1}', 1),  # _parse_pairs()
    ],
)
def test_few_values_of_a_text_need_a_python_call(item, calls):
    """The standard library's C code parses the rest. A Python call takes as long as parsing 20 bytes."""
    counted = Counter()

    def count(frame, event, argument):
        counted[event, frame.f_code.co_filename] += 1

    body = b"[" + b",".join([item.encode()] * 400) + b"]"
    sys.setprofile(count)
    try:
        of(parse_json(body))
    finally:
        sys.setprofile(None)
    assert counted["call", parsing.__file__] - calls * 400 < 10


@pytest.mark.parametrize(
    "body",
    [
        *[b"NaN", b"[Infinity]", b'{"a": -Infinity}', b"1e400", b"[-1e400]", b"1e-99999999999999999999999"],
        *[
            b"1e999999999",
            b"1" * 5_000,
            b"-" + b"1" * 100_000,
            b"1" * 100_000 + b".0",
            b"[" * 100_000,
        ],
        *[b"1" + b"0" * 5_000, b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000],
    ],
    ids=lambda body: body[:12].decode(),
)
def test_json_that_python_cannot_hold_is_refused(body):
    with pytest.raises(PayloadInvalidError):
        parse_json(body)


NOT_JSON = [b"", b" ", b"{", b"{'a': 1}", b'{"a": 1} x', b"\xff", b'"\xed\xa0\x80"', b"\xef\xbb\xbf{}", b"\x00"]


@pytest.mark.parametrize("body", [*NOT_JSON, b'"\x00"', b"01"])
def test_a_body_that_is_not_json_is_left_to_the_caller(body):
    with pytest.raises(ValueError, match=r".") as caught:
        parse_json(body)
    assert not isinstance(caught.value, PayloadInvalidError)


@pytest.mark.parametrize("body", [b'{"a": 1, "a": 2}', b'[{"b": {"\\u0061": 1, "a": 1}}]'])
def test_json_with_a_repeated_name_is_compared_by_its_bytes(body):
    assert parse_json(body) == body
