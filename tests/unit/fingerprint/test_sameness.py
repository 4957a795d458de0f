"""Two payloads have one fingerprint if, and only if, they are the same request."""

from __future__ import annotations

import dataclasses
import datetime as dt
import io
from collections import OrderedDict
from collections.abc import Callable
from decimal import Decimal
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from django.core.files.uploadedfile import (
    InMemoryUploadedFile,
    SimpleUploadedFile,
    TemporaryUploadedFile,
    UploadedFile,
)
from django.http import QueryDict
from django.utils.datastructures import MultiValueDict
from django.utils.safestring import SafeString
from hypothesis import given
from hypothesis import strategies as st

from idempotency.identity.fingerprint import Payload
from idempotency.identity.parsing import parse_json
from tests.unit.fingerprint.commands import Charge, Colour, near, nested, of, scalars, typed


class Size(str, Enum):
    RED = "red"


class Level(IntEnum):
    ONE = 1


@dataclasses.dataclass
class Refund:
    amount: int
    currency: str = "usd"


def upload(name: str = "a.txt", content: bytes = b"1", content_type: str = "text/plain") -> SimpleUploadedFile:
    return SimpleUploadedFile(name, content, content_type)


MIDNIGHT = dt.datetime(2024, 1, 1)

# Its members are different requests, each of them.
DISTINCT: list[object] = [
    *[None, False, True, 0, 1, -1, 0.0, -0.0, 1.0, 1e300, 10**300, 2**53, 2**53 + 1],
    *["", "1", "1.0", "n", "True", b"", b"1", b"1&"],
    *["\ud800", "\udc00", "\ud83d\udd11", "🔑", "\ufffd"],  # half a pair, the other half, both, what they stand for
    *[[], [None], [[]], ["ab"], ["a", "b"], ["b", "a"], [["a", 1]], set(), {1}],
    *[{}, {"a": 1}, {"a": 2}, {"a": None}, {"b": 1}, {"a": {"a": 1}}, {"a": "1"}, {"a": ["1"]}],
    *[parse_json(b'{"a": 1, "a": 2}'), parse_json(b'{"a": 2, "a": 1}')],
    *map(Decimal, ["1", "0", "-0", "10", "0.1", "1." + "0" * 28 + "1", "1." + "0" * 29 + "1"]),
    *[UUID(int=1), str(UUID(int=1))],
    *[MIDNIGHT.date(), MIDNIGHT, MIDNIGHT.replace(fold=1), MIDNIGHT.replace(tzinfo=dt.timezone.utc)],
    *[MIDNIGHT.replace(microsecond=1, tzinfo=dt.timezone.utc), dt.timedelta(days=1)],
    *[dt.time(12), dt.time(12, fold=1), dt.time(12, tzinfo=dt.timezone.utc)],
    *[Colour.RED, Size.RED, "red", Level.ONE],
    *[Charge(1), Charge(1, "eur"), Refund(1), {"amount": 1, "currency": "usd"}],
    *[MultiValueDict({"a": values}) for values in (["1"], ["1", "2"], ["2", "1"], [])],
    *[upload(), upload("b.txt"), upload(content=b"2"), upload(content_type="text/html")],
]
SAME: dict[str, tuple[object, object]] = {
    "order of names": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "list and tuple": ([1, 2], (1, 2)),
    "kinds of mapping": ({"a": 1}, OrderedDict(a=1)),
    "a mapping that is not a dict": ({"a": 1}, MappingProxyType({"a": 1})),
    "kinds of set": ({1, "a"}, frozenset(["a", 1])),
    "trailing zeros of a Decimal": (Decimal(10), Decimal("1.000E+1")),
    "zeros": (Decimal(0), Decimal("0.000")),
    "one instant, two zones": (
        dt.datetime(2024, 7, 1, 12, tzinfo=dt.timezone.utc),
        dt.datetime(2024, 7, 1, 14, tzinfo=ZoneInfo("Europe/Paris")),
    ),
    "kinds of text": ("a", SafeString("a")),
    "kinds of bytes": (b"a", bytearray(b"a")),
    "a view of bytes": (b"ac", memoryview(b"abc")[::2]),
    "kinds of int": (7, type("Count", (int,), {})(7)),
    "kinds of float": (0.5, type("Ratio", (float,), {})(0.5)),
    "fields that don't compare": (Charge(1, trace="a"), Charge(1, trace="b")),
    "order of a form's names": (QueryDict("a=1&b=2&a=3"), QueryDict("b=2&a=1&a=3")),
    "kinds of form": (QueryDict("a=1"), MultiValueDict({"a": ["1"]})),
}


def test_different_values_differ() -> None:
    seen: dict[str, object] = {}
    for command in DISTINCT:
        same = seen.setdefault(of(command), command)
        assert same is command, f"{command!r} has the fingerprint of {same!r}"


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_spellings_of_one_value_are_the_same(one: object, other: object) -> None:
    assert of(one) == of(other)
    assert of([{"x": one}]) == of([{"x": other}])


@given(nested(scalars))
def test_a_fingerprint_is_stable(command: object) -> None:
    assert of(command) == of(command)
    assert Payload(command).matches(of(command))


@given(nested(near), nested(near))
def test_two_payloads_are_the_same_only_with_the_same_types(one: object, other: object) -> None:
    assert (of(one) == of(other)) == (typed(one) == typed(other))


@given(st.decimals(allow_nan=False, allow_infinity=False), st.integers(min_value=0, max_value=40))
def test_a_decimal_is_its_exact_value(number: Decimal, zeros: int) -> None:
    sign, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    assert of(Decimal((sign, digits + (0,) * zeros, exponent - zeros))) == of(number)
    if number:
        assert of(Decimal((sign, (*digits[:-1], (digits[-1] + 1) % 10), exponent))) != of(number)


# Uploads: the fingerprint is of the content, which is read where it is kept and left as it was


def temporary_upload(content: bytes) -> TemporaryUploadedFile:
    upload = TemporaryUploadedFile("a.txt", "text/plain", len(content), None)
    upload.write(content)
    upload.seek(0)
    return upload


def memory_upload(content: bytes) -> InMemoryUploadedFile:
    return InMemoryUploadedFile(io.BytesIO(content), "file", "a.txt", "text/plain", len(content), None)


@pytest.mark.parametrize("make", [temporary_upload, memory_upload])
def test_an_upload_is_read_and_left_as_it_was(make: Callable[[bytes], UploadedFile[Any]]) -> None:
    content = b"0123456789" * 20_000  # several chunks
    upload = make(content)
    before = of(upload)
    assert upload.tell() == 0
    upload.seek(7)
    assert of(upload) == before
    assert upload.tell() == 7
    assert of(make(content[:-1] + b"x")) != before
    upload.close()


def test_where_an_upload_is_kept_does_not_count() -> None:
    with temporary_upload(b"content") as spilled:
        assert of(spilled) == of(memory_upload(b"content"))


def test_an_upload_that_cannot_be_read_twice_is_named_with_the_remedy() -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def tell(self) -> int:
            raise io.UnsupportedOperation("tell")

    closed = memory_upload(b"")
    closed.close()
    for upload in (UploadedFile(Pipe(b""), "pipe.txt"), closed, UploadedFile(None, "nothing.txt")):
        with pytest.raises(TypeError, match="can't be read twice"):
            of(upload)
