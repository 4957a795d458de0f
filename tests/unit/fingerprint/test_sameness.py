"""Payloads share a fingerprint if and only if they are the same request. One that can't be fingerprinted is refused."""

import dataclasses
import datetime as dt
import inspect
import io
import math
import sys
from collections import OrderedDict
from decimal import Decimal
from enum import Enum, IntEnum
from types import MappingProxyType
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from django.core.files.uploadedfile import InMemoryUploadedFile, SimpleUploadedFile, TemporaryUploadedFile, UploadedFile
from django.http import QueryDict
from django.utils.datastructures import MultiValueDict
from django.utils.safestring import SafeString
from hypothesis import given
from hypothesis import strategies as st

from idempotency.exceptions import PayloadInvalidError
from idempotency.identity.parsing import MAX_DEPTH, parse_json
from tests.unit.fingerprint.commands import Colour, near, nested, of, typed


class Size(str, Enum):  # noqa: UP042 - payloads may have such a value
    RED = "red"


class Level(IntEnum):
    ONE = 1


class Plain(Enum):
    RED = "red"


@dataclasses.dataclass
class Charge:
    amount: int


def upload(name="a.txt", content=b"1", content_type="text/plain"):
    return SimpleUploadedFile(name, content, content_type)


MIDNIGHT = dt.datetime(2024, 1, 1)

# Each member is a different request.
DISTINCT = [
    *[None, False, True, 0, 1, -1, 0.5, 1e300, 10**300 + 1, 2**53, 2**53 + 1, 10**400],
    *[10**100_000, 10**100_000 + 1, -(10**100_000)],
    *["", "1", "1.0", "n", "True", b"", b"1", b"1&"],
    *["\ud800", "\udc00", "\ud83d\udd11", "🔑", "\ufffd"],  # half a surrogate pair, the other half, both, the character
    *[[], [None], [[]], ["ab"], ["a", "b"], ["b", "a"], [["a", 1]]],
    *[{}, {"a": 1}, {"a": 2}, {"a": None}, {"b": 1}, {"a": {"a": 1}}, {"a": "1"}, {"a": ["1"]}],
    *map(parse_json, [b'{"a": 1, "a": 2}', b'{"a": 2, "a": 1}', b'{"a": 1}', b'{"a": 2}', b'[["a", 1], ["a", 2]]']),
    *map(Decimal, ["10", "0.1", "1." + "0" * 28 + "1", "1." + "0" * 29 + "1", "1e999999999", "1e-999999999"]),
    *[UUID(int=1), str(UUID(int=1))],
    *[MIDNIGHT.date(), MIDNIGHT, MIDNIGHT.replace(fold=1), MIDNIGHT.replace(tzinfo=dt.UTC)],
    *[MIDNIGHT.replace(microsecond=1, tzinfo=dt.UTC), dt.timedelta(days=1)],
    *[dt.time(12), dt.time(12, fold=1), dt.time(12, tzinfo=dt.UTC)],
    dt.datetime.max.replace(tzinfo=dt.timezone(dt.timedelta(hours=-12))),
    dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=12))),
    *[10**60, 1e60, "red", {"amount": 1, "currency": "usd"}],  # only shorter numbers have one form
    *[MultiValueDict({"a": values}) for values in (["1"], ["1", "2"], ["2", "1"], [])],
    *[upload(), upload("b.txt"), upload(content=b"2"), upload(content_type="text/html")],
]
SAME = {
    "order of names": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "list and tuple": ([1, 2], (1, 2)),
    "kinds of mapping": ({"a": 1}, OrderedDict(a=1)),
    "a mapping that is not a dict": ({"a": 1}, MappingProxyType({"a": 1})),
    "trailing zeros of a Decimal": (Decimal(10), Decimal("1.000E+1")),
    "zeros": (Decimal(0), Decimal("0.000")),
    "a huge power of zero": (0, Decimal("0e999999999")),
    "an int and a float": (1, 1.0),
    "zero and minus zero": (0, -0.0),
    "an int and a Decimal": (1, Decimal("1.00")),
    "a float and a Decimal": (0.1, Decimal("0.10")),
    "a long int, a float and a Decimal": (10**49, 1e49),
    "a long int and a Decimal": (10**50 - 1, Decimal(10**50 - 1)),
    "a choice and its value": (Size.RED, "red"),
    "a renamed class of a choice": (Size.RED, Colour.RED),
    "a numbered choice and its value": (Level.ONE, 1),
    "one instant, two zones": (
        dt.datetime(2024, 7, 1, 12, tzinfo=dt.UTC),
        dt.datetime(2024, 7, 1, 14, tzinfo=ZoneInfo("Europe/Paris")),
    ),
    "kinds of text": ("a", SafeString("a")),
    "kinds of bytes": (b"a", bytearray(b"a")),
    "a view of bytes": (b"ac", memoryview(b"abc")[::2]),
    "kinds of int": (7, type("Count", (int,), {})(7)),
    "kinds of float": (0.5, type("Ratio", (float,), {})(0.5)),
    "order of a form's names": (QueryDict("a=1&b=2&a=3"), QueryDict("b=2&a=1&a=3")),
    "kinds of form": (QueryDict("a=1"), MultiValueDict({"a": ["1"]})),
}


def test_different_values_differ():
    seen = {}
    for command in DISTINCT:
        same = seen.setdefault(of(command), command)
        assert same is command, f"{type(command)} and {type(same)} have the same fingerprint"


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_spellings_of_one_value_are_the_same(one, other):
    assert of(one) == of(other)
    assert of([{"x": one}]) == of([{"x": other}])


@given(nested(near), nested(near))
def test_two_payloads_are_the_same_only_with_the_same_types(one, other):
    assert (of(one) == of(other)) == (typed(one) == typed(other))


@given(st.decimals(allow_nan=False, allow_infinity=False), st.integers(min_value=0, max_value=40))
def test_a_decimal_is_its_exact_value(number, zeros):
    sign, digits, exponent = number.as_tuple()
    assert of(Decimal((sign, digits + (0,) * zeros, exponent - zeros))) == of(number)
    if number:
        assert of(Decimal((sign, (*digits[:-1], (digits[-1] + 1) % 10), exponent))) != of(number)


# Uploads: the content is fingerprinted in place, and the file's position is restored


def temporary_upload(content):
    upload = TemporaryUploadedFile("a.txt", "text/plain", len(content), None)
    upload.write(content)
    upload.seek(0)
    return upload


def memory_upload(content):
    return InMemoryUploadedFile(io.BytesIO(content), "file", "a.txt", "text/plain", len(content), None)


@pytest.mark.parametrize("make", [temporary_upload, memory_upload])
def test_reading_an_upload_restores_its_position(make):
    content = b"0123456789" * 20_000  # several chunks
    upload = make(content)
    before = of(upload)
    assert upload.tell() == 0
    upload.seek(7)
    assert of(upload) == before
    assert upload.tell() == 7
    another = make(content[:-1] + b"x")
    assert of(another) != before == of(memory_upload(content))  # in memory or on disk
    # Since Python 3.14, an unclosed temporary file raises a warning.
    another.close()
    upload.close()


def test_an_upload_that_cannot_be_read_twice_is_refused():
    class Pipe(io.BytesIO):
        def seekable(self):
            return False

        def tell(self):
            raise io.UnsupportedOperation("tell")

    closed = memory_upload(b"")
    closed.close()
    for upload in (UploadedFile(Pipe(b""), "pipe.txt"), closed, UploadedFile(None, "nothing.txt")):
        with pytest.raises(TypeError, match="can't be read twice"):
            of(upload)


# Refused payloads: too deep, not finite, or without a canonical form


def nest(levels, wrap=lambda inner: [inner]):
    value = 1
    for _ in range(levels):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    ("wrap", "levels"),
    [
        (lambda inner: [inner], 1),
        (lambda inner: {"a": inner}, 1),
        (lambda inner: MultiValueDict({"a": [inner]}), 2),  # one level for the names, one for the values
    ],
    ids=["list", "object", "form"],
)
def test_nesting_is_bounded(wrap, levels):
    deepest = MAX_DEPTH // levels
    assert of(nest(deepest, wrap)) != of(nest(deepest - 1, wrap))
    for number in (deepest + 1, 5_000):
        with pytest.raises(PayloadInvalidError, match="levels deep"):
            of(nest(number, wrap))


def test_a_payload_that_contains_itself_is_refused():
    loop = []
    loop.append({"again": loop})
    with pytest.raises(PayloadInvalidError):
        of(loop)


def test_a_caller_close_to_the_recursion_limit_gets_the_same_error():
    deep = nest(MAX_DEPTH)

    def descend(frames):
        return descend(frames - 1) if frames else of(deep)

    with pytest.raises(PayloadInvalidError):
        descend(sys.getrecursionlimit() - len(inspect.stack(0)) - MAX_DEPTH // 2)


@pytest.mark.parametrize(
    "number", [math.nan, math.inf, -math.inf, *map(Decimal, ("NaN", "sNaN", "-Infinity"))], ids=str
)
def test_a_number_that_is_not_finite_is_refused(number):
    with pytest.raises(PayloadInvalidError, match="not finite"):
        of({"amount": [number]})


@pytest.mark.parametrize(
    "value",
    [object(), print, int, Charge(1), (i for i in "a"), 1j, io.BytesIO(), {1}, frozenset("a"), Plain.RED],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.failure_120
def test_the_error_for_an_unsupported_type_names_it_and_the_remedy(value):
    with pytest.raises(TypeError, match=rf"{type(value).__qualname__} can't be fingerprinted\. Give the operation"):
        of({"a": value})


@pytest.mark.parametrize(
    "command", [{1: "a"}, {"a": 1, 2: 3}, {None: 1, "a": 2}, {Colour.RED: 1}, MultiValueDict({1: []})]
)
def test_names_must_be_plain_text(command):
    with pytest.raises(TypeError, match="Use plain str for the names in the command"):
        of(command)
