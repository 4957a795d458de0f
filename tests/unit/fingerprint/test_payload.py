"""The input of a fingerprint: the command, the method, the route and the query, under a version."""

import dataclasses
import datetime as dt
import itertools
from decimal import Decimal
from uuid import UUID

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import QueryDict
from django.test import override_settings
from hypothesis import given
from hypothesis import strategies as st

from idempotency.identity import fingerprint
from idempotency.identity.fingerprint import Payload
from idempotency.identity.parsing import parse_json
from tests.unit.fingerprint.commands import Colour


@given(st.text(), st.text(), st.text(), st.text())
def test_nothing_collides_by_concatenation(method, route, query, command):
    payload = Payload(command, method=method, route=([route], {}), query=query)
    for left, right in itertools.permutations((method, route, query, command), 2):
        if left and left != right:
            moved = Payload(left + command, method=method, route=([route], {}), query=query)
            assert moved.request_hash != payload.request_hash
    assert Payload([command], method=method, route=([route], {}), query=query).request_hash != payload.request_hash


def test_method_route_and_query_are_part_of_the_payload():
    base = Payload({"a": 1}, method="POST", route=((), {"pk": 1}), query="a=1")
    changes = [
        *({"content": {"a": 2}}, {"method": "PATCH"}, {"query": "a=2"}, {"query": ""}),
        *({"route": route} for route in (((), {"pk": 2}), ((1,), {}), {"pk": 1})),
    ]
    for change in changes:
        changed = dataclasses.replace(base, **change)
        assert changed.request_hash != base.request_hash
        assert not changed.matches(base.request_hash)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("a=1&b=2&a=3", "b=2&a=1&a=3", True),
        ("a&b", "b&a", True),
        ("%62=1&a=2", "a=2&%62=1", True),
        ("\u20ac=1&a=2", "a=2&\u20ac=1", True),
        ("a=1", "a=1&a=1", False),
        ("a", "a=", False),
        ("", "a", False),
        ("", "&", False),
        ("a=1%26b=2", "a=1&b=2", False),
        ("a+b=2&a%20b=1", "a%20b=1&a+b=2", False),
        ("\xc3\xa9=2&%C3%A9=1", "%C3%A9=1&\xc3\xa9=2", False),
    ],
)
def test_only_the_order_of_different_parameters_is_ignored(one, other, same):
    assert (Payload(None, query=one).request_hash == Payload(None, query=other).request_hash) == same


@override_settings(IDEMPOTENCY={"FINGERPRINT_KEYS": ["secret"]})
def test_the_algorithm_is_as_released():
    """Existing records use it. If this fails, add a version instead of changing one."""
    payload = Payload(
        {
            "amount": Decimal("10.50"),
            "capture": True,
            "items": [1, -1, 1.5, None, "é", "\ud800", b"raw", {"nested": []}],
            "at": dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC),
            "day": dt.date(2024, 1, 1),
            "hour": dt.time(12),
            "for": dt.timedelta(hours=1),
            "id": UUID(int=1),
            "colour": Colour.RED,
            "form": QueryDict("a=1&a=2"),
            "file": SimpleUploadedFile("a.txt", b"content"),
            "json": parse_json(b'{"b": [1, 1.50, 9007199254740992.5, 1e60, null], "a": {}}'),
        },
        method="POST",
        route=((), {"pk": 7}),
        query="b=2&a=1",
    )
    version, secret_id, digest = payload.request_hash.split(":")
    assert (version, len(secret_id)) == ("v1", 8)
    assert digest == "19c202e0c367f52e64c9d82674a4b2508a758ccad4a17398529d75ee140234b4"


KEYED = Payload({"pin": 1234}, method="POST")


@pytest.mark.parametrize("setting", ["SECRET_KEY", "FINGERPRINT_KEYS"])
def test_a_fingerprint_depends_on_the_secret(setting):
    def fingerprint_with(secret):
        changed = {"SECRET_KEY": secret} if setting == "SECRET_KEY" else {"IDEMPOTENCY": {"FINGERPRINT_KEYS": [secret]}}
        with override_settings(**changed):
            return dataclasses.replace(KEYED).request_hash

    assert fingerprint_with("one") == fingerprint_with("one") != fingerprint_with("other")
    assert KEYED._digest.hex() not in fingerprint_with("one")


@pytest.mark.parametrize(
    "rotated",
    [
        {"SECRET_KEY": "new", "SECRET_KEY_FALLBACKS": ["older", "old"]},
        {"IDEMPOTENCY": {"FINGERPRINT_KEYS": ["new", b"old"]}},
        {"IDEMPOTENCY": {"FINGERPRINT_KEYS": ("new", "older", "old")}, "SECRET_KEY": "another"},
    ],
)
def test_a_record_from_before_a_rotation_is_recognised(rotated):
    with override_settings(SECRET_KEY="old"):
        recorded = dataclasses.replace(KEYED).request_hash
    with override_settings(**rotated):
        assert dataclasses.replace(KEYED).matches(recorded)
        assert not dataclasses.replace(KEYED, method="PATCH").matches(recorded)
        assert dataclasses.replace(KEYED).request_hash != recorded
    with override_settings(SECRET_KEY="new"):
        assert not dataclasses.replace(KEYED).matches(recorded)


@pytest.mark.parametrize(
    "request_hash",
    ["", ":", "v1", "v1:", "v0:00", "v999:00", "00", "v1:" + "0" * 64, f"v1:{'0' * 8}:{'0' * 64}"],
)
def test_a_fingerprint_of_an_unknown_version_matches_nothing(request_hash):
    assert not Payload({"a": 1}).matches(request_hash)


def test_a_fingerprint_names_its_secret():
    with override_settings(SECRET_KEY="old"):
        recorded = dataclasses.replace(KEYED).request_hash
        assert fingerprint.has_known_secret(recorded)
    with override_settings(SECRET_KEY="new"):
        assert not fingerprint.has_known_secret(recorded)
    with override_settings(SECRET_KEY="new", SECRET_KEY_FALLBACKS=["old"]):
        assert fingerprint.has_known_secret(recorded)
