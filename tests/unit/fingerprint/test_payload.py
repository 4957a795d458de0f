"""What a fingerprint is of: the command, the method, the route and the query, under a version."""

from __future__ import annotations

import dataclasses
import datetime as dt
import itertools
from decimal import Decimal
from uuid import UUID

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import QueryDict
from hypothesis import given
from hypothesis import strategies as st

from idempotency import fingerprint
from idempotency.fingerprint import Payload, RepeatedNames
from tests.unit.fingerprint.commands import Charge, Colour


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
