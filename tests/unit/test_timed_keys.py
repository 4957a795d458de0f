"""Which keys carry their time, and how it is read."""

from __future__ import annotations

import time
from uuid import RFC_4122, UUID

import pytest

from idempotency.identity.keys import new_key, parse_header, time_of


def test_a_new_key_is_a_uuid_of_version_7_that_carries_its_time() -> None:
    before = int(time.time() * 1000) / 1000
    keys = [new_key() for _ in range(100)]
    assert {(UUID(key).version, UUID(key).variant) for key in keys} == {(7, RFC_4122)}
    assert all(before <= (time_of(key) or 0) <= time.time() for key in keys)
    assert len(set(keys)) == 100
    assert parse_header(keys[0]) == keys[0]


@pytest.mark.parametrize(
    ("key", "moment"),
    [
        ("017F22E2-79B0-7CC3-98C4-DC0C0C07398F", 1645557742.0),  # the example of RFC 9562
        ("017f22e2-79b0-7cc3-98c4-dc0c0c07398f", 1645557742.0),
        ("01ARZ3NDEKTSV4RRFFQ69G5FAV", 1469922850.259),  # the example of the specification of ULIDs
        ("01arz3ndektsv4rrffq69g5fav", 1469922850.259),
        ("7ZZZZZZZZZZZZZZZZZZZZZZZZZ", (2**48 - 1) / 1000),
        ("8ZZZZZZZZZZZZZZZZZZZZZZZZZ", None),  # more than 48 bits of time
        ("01ARZ3NDEKTSV4RRFFQ69G5FAU", None),  # U is no digit
        ("017f22e279b07cc398c4dc0c0c07398f", None),
        ("017f22e2-79b0-7cc3-c8c4-dc0c0c07398f", None),  # another variant
        ("017f22e2-79b0-7cc3-98c4-dc0c0c07398f-1", None),
        ("01A\N{KELVIN SIGN}Z3NDEKTSV4RRFFQ69G5FAV", None),  # no K, though it is one in lower case
        ("d5b6cf02-e68b-11f1-9872-02fc00000001", None),  # version 1
        ("18817113-3f18-4cae-8b73-d79cc9739af9", None),  # version 4
        ("order-71", None),
        ("", None),
    ],
)
def test_the_time_of_a_key_is_read_from_two_forms_only(key: str, moment: float | None) -> None:
    assert time_of(key) == moment
