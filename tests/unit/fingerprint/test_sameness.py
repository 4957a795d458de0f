"""Two payloads have one fingerprint if, and only if, they are the same request."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections import OrderedDict
from decimal import Decimal
from enum import Enum, IntEnum
from random import Random
from types import MappingProxyType
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
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


# Its members are different requests, each of them.
DISTINCT: dict[str, object] = {
    "None": None,
    "False": False,
    "True": True,
    "0": 0,
    "1": 1,
    "-1": -1,
    "0.0": 0.0,
    "-0.0": -0.0,
    "1.0": 1.0,
    "1e300": 1e300,
    "10**300": 10**300,
    "2**53": 2**53,
    "2**53+1": 2**53 + 1,
    "empty text": "",
    "text 1": "1",
    "text 1.0": "1.0",
    "text n": "n",
    "text true": "True",
    "empty bytes": b"",
    "bytes 1": b"1",
    "bytes and": b"1&",
    "empty list": [],
    "list of None": [None],
    "list of an empty list": [[]],
    "list of a text": ["ab"],
    "list of two texts": ["a", "b"],
    "the same, turned": ["b", "a"],
    "empty object": {},
    "object": {"a": 1},
    "object with None": {"a": None},
    "object, other name": {"b": 1},
    "object in object": {"a": {"a": 1}},
    "pairs": [["a", 1]],
    "repeated names": parse_json(b'{"a": 1, "a": 2}'),
    "repeated names, turned": parse_json(b'{"a": 2, "a": 1}'),
    "last of them": {"a": 2},
    "empty set": set(),
    "set": {1},
    "Decimal 1": Decimal(1),
    "Decimal 0": Decimal(0),
    "Decimal -0": Decimal("-0"),
    "Decimal 10": Decimal(10),
    "Decimal 0.1": Decimal("0.1"),
    "Decimal, 30 digits": Decimal("1.00000000000000000000000000001"),
    "Decimal, 31 digits": Decimal("1.000000000000000000000000000001"),
    "UUID": UUID(int=1),
    "text UUID": str(UUID(int=1)),
    "date": dt.date(2024, 1, 1),
    "naive datetime": dt.datetime(2024, 1, 1),
    "naive datetime, fold": dt.datetime(2024, 1, 1, fold=1),
    "datetime": dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc),
    "datetime, a microsecond later": dt.datetime(2024, 1, 1, 0, 0, 0, 1, tzinfo=dt.timezone.utc),
    "time": dt.time(12),
    "time, fold": dt.time(12, fold=1),
    "aware time": dt.time(12, tzinfo=dt.timezone.utc),
    "timedelta": dt.timedelta(days=1),
    "enum": Colour.RED,
    "another enum": Size.RED,
    "value of the enum": "red",
    "int enum": Level.ONE,
    "dataclass": Charge(1),
    "dataclass, another field": Charge(1, "eur"),
    "another dataclass": Refund(1),
    "fields of the dataclass": {"amount": 1, "currency": "usd"},
    "form": MultiValueDict({"a": ["1"]}),
    "form, two values": MultiValueDict({"a": ["1", "2"]}),
    "form, turned": MultiValueDict({"a": ["2", "1"]}),
    "form, no value": MultiValueDict({"a": []}),
    "object of texts": {"a": "1"},
    "object of lists": {"a": ["1"]},
    "upload": SimpleUploadedFile("a.txt", b"1"),
    "upload, another name": SimpleUploadedFile("b.txt", b"1"),
    "upload, another content": SimpleUploadedFile("a.txt", b"2"),
    "upload, another type": SimpleUploadedFile("a.txt", b"1", content_type="text/html"),
    "lone surrogate": "\ud800",
    "the other half": "\udc00",
    "both halves": "\ud83d\udd11",
    "what they stand for": "🔑",
    "a replacement": "\ufffd",
}
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
    seen: dict[str, str] = {}
    for label, command in DISTINCT.items():
        same = seen.setdefault(of(command), label)
        assert same == label, f"{label} has the fingerprint of {same}"


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


@given(st.dictionaries(st.text(), nested(scalars)), st.randoms(use_true_random=False))
def test_the_order_of_names_does_not_count(command: dict[str, object], random: Random) -> None:
    items = list(command.items())
    random.shuffle(items)
    assert of(dict(items)) == of(command)


@given(st.lists(near, min_size=2), st.randoms(use_true_random=False))
def test_the_order_of_a_list_counts(command: list[object], random: Random) -> None:
    shuffled = list(command)
    random.shuffle(shuffled)
    assert (of(shuffled) == of(command)) == (typed(shuffled) == typed(command))


@given(st.lists(st.sets(near.filter(lambda value: value is not True and value != 1)), min_size=2, max_size=2))
def test_sets_of_the_same_items_are_the_same(sets: list[set[object]]) -> None:
    one, other = sets
    assert (of(one) == of(other)) == (frozenset(map(typed, one)) == frozenset(map(typed, other)))


@given(st.decimals(allow_nan=False, allow_infinity=False), st.integers(min_value=0, max_value=40))
def test_a_decimal_is_its_exact_value(number: Decimal, zeros: int) -> None:
    sign, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    assert of(Decimal((sign, digits + (0,) * zeros, exponent - zeros))) == of(number)
    if number:
        assert of(Decimal((sign, (*digits[:-1], (digits[-1] + 1) % 10), exponent))) != of(number)
