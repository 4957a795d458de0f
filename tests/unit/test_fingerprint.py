"""Two payloads have one fingerprint if, and only if, they are the same request."""

from __future__ import annotations

import dataclasses
import datetime as dt
import inspect
import io
import itertools
import json
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from decimal import Decimal
from enum import Enum, IntEnum
from random import Random
from types import MappingProxyType
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from django.core.files.uploadedfile import InMemoryUploadedFile, SimpleUploadedFile, TemporaryUploadedFile, UploadedFile
from django.http import QueryDict
from django.utils.datastructures import MultiValueDict
from django.utils.safestring import SafeString
from hypothesis import given
from hypothesis import strategies as st

from idempotency import fingerprint
from idempotency.exceptions import PayloadInvalidError
from idempotency.fingerprint import MAX_DEPTH, Payload, RepeatedNames, parse_json

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(alphabet=st.characters())  # lone surrogates included
)
# Few and colliding values, so that two draws are often nearly the same.
near = st.sampled_from([None, True, False, 0, 1, 0.0, -0.0, 1.0, "", "0", "1", "n", "s1:a", "a", b"", b"a"])
names = st.sampled_from(["", "a", "b", "a1", "1:a"])


def nested(leaves: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=8
    )


def of(command: object) -> str:
    return Payload(command).request_hash


def typed(value: object) -> object:
    """An independent notion of sameness: the value with the type of everything in it."""
    if isinstance(value, dict):
        return "object", frozenset((name, typed(item)) for name, item in value.items())
    if isinstance(value, list):
        return "list", tuple(typed(item) for item in value)
    if isinstance(value, float):
        return "float", value.hex()
    return type(value).__name__, value


class Colour(str, Enum):
    RED = "red"


class Size(str, Enum):
    RED = "red"


class Level(IntEnum):
    ONE = 1


@dataclasses.dataclass
class Charge:
    amount: int
    currency: str = "usd"
    trace: str = dataclasses.field(default="", compare=False)


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
    "repeated names": RepeatedNames([("a", 1), ("a", 2)]),
    "repeated names, turned": RepeatedNames([("a", 2), ("a", 1)]),
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


@given(st.text(), st.text(), st.text(), st.text())
def test_nothing_collides_by_concatenation(method: str, route: str, query: str, command: str) -> None:
    payload = Payload(command, method=method, route=([route], {}), query=query)
    for left, right in itertools.permutations((method, route, query, command), 2):
        if left and left != right:
            moved = Payload(left + command, method=method, route=([route], {}), query=query)
            assert moved.request_hash != payload.request_hash
    assert Payload([command], method=method, route=([route], {}), query=query).request_hash != payload.request_hash


def test_method_route_and_query_are_part_of_the_payload() -> None:
    base = Payload({"a": 1}, method="POST", route=((), {"pk": 1}), query="a=1")
    for changed in (
        dataclasses.replace(base, command={"a": 2}),
        dataclasses.replace(base, method="PATCH"),
        dataclasses.replace(base, route=((), {"pk": 2})),
        dataclasses.replace(base, route=((1,), {})),
        dataclasses.replace(base, route={"pk": 1}),
        dataclasses.replace(base, query="a=2"),
        dataclasses.replace(base, query=""),
    ):
        assert changed.request_hash != base.request_hash
        assert not changed.matches(base.request_hash)


@pytest.mark.parametrize(
    ("one", "other"),
    [("a=1&b=2", "b=2&a=1"), ("a=1&b=2&a=3", "b=2&a=1&a=3"), ("a&b", "b&a")],
)
def test_the_order_of_parameters_of_different_names_does_not_count(one: str, other: str) -> None:
    assert Payload(None, query=one).request_hash == Payload(None, query=other).request_hash


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a=&a=b&c=", "a=&b=c&b="),
        ("a=1&a=2", "a=2&a=1"),
        ("a=1", "a=1&a=1"),
        ("a", "a="),
        ("", "a"),
        ("", "&"),
        ("a=1%26b=2", "a=1&b=2"),
    ],
)
def test_other_parameters_are_another_payload(one: str, other: str) -> None:
    assert Payload(None, query=one).request_hash != Payload(None, query=other).request_hash


def test_the_first_version_is_what_it_was_when_it_was_released() -> None:
    """Records were made with it. If this fails, add a version instead of changing one."""
    payload = Payload(
        {
            "amount": Decimal("10.50"),
            "capture": True,
            "items": [1, -1, 1.5, None, "é", "\ud800", b"raw", {"nested": []}],
            "at": dt.datetime(2024, 1, 1, 12, tzinfo=dt.timezone.utc),
            "day": dt.date(2024, 1, 1),
            "hour": dt.time(12),
            "for": dt.timedelta(hours=1),
            "id": UUID(int=1),
            "colour": Colour.RED,
            "tags": {"b", "a"},
            "charge": Charge(1),
            "form": QueryDict("a=1&a=2"),
            "file": SimpleUploadedFile("a.txt", b"content"),
            "twice": RepeatedNames([("a", 1), ("a", 2)]),
        },
        method="POST",
        route=((), {"pk": 7}),
        query="b=2&a=1",
    )
    assert payload.request_hash == "v1:efda8835bc8fff0a90ea2d8febff0c3a92723f3a515e988861a47a31d0355491"


def test_a_record_is_compared_by_the_version_it_was_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = Payload({"a": 1})
    old = payload.request_hash
    monkeypatch.setattr(fingerprint, "CURRENT_VERSION", "v2")
    monkeypatch.setattr(fingerprint, "_ALGORITHMS", {**fingerprint._ALGORITHMS, "v2": lambda payload: "new"})
    newer = Payload({"a": 1})
    assert newer.request_hash.startswith("v2:")
    assert newer.matches(old)
    assert not Payload({"a": 2}).matches(old)


@pytest.mark.parametrize("request_hash", ["", ":", "v1", "v1:", "v0:00", "v999:00", "00", "v1:" + "0" * 64])
def test_a_fingerprint_of_an_unknown_version_matches_nothing(request_hash: str) -> None:
    assert not Payload({"a": 1}).matches(request_hash)


def nest(levels: int, wrap: Callable[[Any], object] = lambda inner: [inner]) -> object:
    value: object = 1
    for _ in range(levels):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: [inner],
        lambda inner: {"a": inner},
        lambda inner: frozenset([inner]),
        lambda inner: Charge(inner),
        lambda inner: MultiValueDict({"a": [inner]}),
    ],
    ids=["list", "object", "set", "dataclass", "form"],
)
def test_nesting_is_bounded(wrap: Callable[[Any], object]) -> None:
    of(nest(MAX_DEPTH // 2, wrap))  # one form takes two levels: its names, and the values of a name
    for levels in (MAX_DEPTH + 1, 5_000):
        with pytest.raises(PayloadInvalidError, match="levels deep"):
            of(nest(levels, wrap))


def test_the_deepest_payload_has_a_fingerprint() -> None:
    assert of(nest(MAX_DEPTH)) != of(nest(MAX_DEPTH - 1))
    with pytest.raises(PayloadInvalidError):
        of(nest(MAX_DEPTH + 1))


def test_a_payload_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append({"again": loop})
    with pytest.raises(PayloadInvalidError):
        of(loop)


def test_a_caller_close_to_the_limit_of_recursion_gets_the_same_answer() -> None:
    deep = nest(MAX_DEPTH)

    def descend(frames: int) -> str:
        return descend(frames - 1) if frames else of(deep)

    with pytest.raises(PayloadInvalidError):
        descend(sys.getrecursionlimit() - len(inspect.stack(0)) - MAX_DEPTH // 2)


@pytest.mark.parametrize(
    "number", [math.nan, math.inf, -math.inf, *map(Decimal, ("NaN", "sNaN", "-Infinity"))], ids=str
)
def test_a_number_that_is_not_finite_is_refused(number: object) -> None:
    with pytest.raises(PayloadInvalidError, match="not finite"):
        of({"amount": [number]})


def test_an_integer_of_any_size_has_a_fingerprint() -> None:
    assert of(10**100_000) != of(10**100_000 + 1)
    assert of(-(10**100_000)) != of(10**100_000)


@pytest.mark.parametrize(
    "value", [object(), print, int, Charge, (i for i in "a"), 1j, io.BytesIO()], ids=lambda value: type(value).__name__
)
def test_a_type_without_a_canonical_form_is_named_with_the_remedy(value: object) -> None:
    with pytest.raises(TypeError, match=rf"{type(value).__qualname__} can't be fingerprinted\. Give the operation"):
        of({"a": value})


@pytest.mark.parametrize(
    "command", [{1: "a"}, {"a": 1, 2: 3}, {None: 1, "a": 2}, {Colour.RED: 1}, MultiValueDict({1: []})]
)
def test_names_are_plain_text(command: Mapping[object, object]) -> None:
    with pytest.raises(TypeError, match="Give the names in the command as plain str"):
        of(command)


def test_an_instant_at_the_end_of_time_has_a_fingerprint() -> None:
    last = dt.datetime.max.replace(tzinfo=dt.timezone(dt.timedelta(hours=-12)))
    first = dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=12)))
    assert of(last) != of(first)


# Uploads


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


# JSON


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
