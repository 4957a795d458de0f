"""What is too deep, not finite or without a canonical form is refused; all else has a fingerprint."""

from __future__ import annotations

import datetime as dt
import inspect
import io
import math
import sys
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import pytest
from django.utils.datastructures import MultiValueDict

from idempotency.exceptions import PayloadInvalidError
from idempotency.identity.parsing import MAX_DEPTH
from tests.unit.fingerprint.commands import Charge, Colour, of


def nest(levels: int, wrap: Callable[[Any], object] = lambda inner: [inner]) -> object:
    value: object = 1
    for _ in range(levels):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    ("wrap", "levels"),
    [
        (lambda inner: [inner], 1),
        (lambda inner: {"a": inner}, 1),
        (lambda inner: frozenset([inner]), 1),
        (lambda inner: Charge(inner), 1),
        (lambda inner: MultiValueDict({"a": [inner]}), 2),  # its names, and the values of a name
    ],
    ids=["list", "object", "set", "dataclass", "form"],
)
def test_nesting_is_bounded(wrap: Callable[[Any], object], levels: int) -> None:
    deepest = MAX_DEPTH // levels
    assert of(nest(deepest, wrap)) != of(nest(deepest - 1, wrap))
    for number in (deepest + 1, 5_000):
        with pytest.raises(PayloadInvalidError, match="levels deep"):
            of(nest(number, wrap))


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
    with pytest.raises(TypeError, match="Use plain str for the names in the command"):
        of(command)


def test_an_instant_at_the_end_of_time_has_a_fingerprint() -> None:
    last = dt.datetime.max.replace(tzinfo=dt.timezone(dt.timedelta(hours=-12)))
    first = dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=12)))
    assert of(last) != of(first)
