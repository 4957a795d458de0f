"""Valid keys, and values derived from a key. ``tests/http/test_protocol.py`` covers what a client may send."""

import re
import time
from uuid import RFC_4122, UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from idempotency.exceptions import KeyInvalidError
from idempotency.identity.keys import (
    HEADER,
    MAX_LENGTH,
    META_NAME,
    new_key,
    parse_header,
    shorten,
    time_of,
    validate_key,
)
from idempotency.identity.scope import Scope

VISIBLE = "".join(map(chr, range(0x21, 0x7F)))

visible_keys = st.text(alphabet=VISIBLE, min_size=1, max_size=MAX_LENGTH)


def quoted(key):
    """A key as RFC 9651 writes a string (section 4.1.6)."""
    return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'


def test_a_new_key_has_its_time_and_74_random_bits():
    before = time.time_ns() // 1_000_000
    made = [UUID(new_key()) for _ in range(2)]
    assert [(key.version, key.variant) for key in made] == [(7, RFC_4122)] * 2
    assert before <= made[0].int >> 80 <= made[1].int >> 80 <= time.time_ns() // 1_000_000
    assert len({key.int & (1 << 62) - 1 for key in made}) == 2


def test_the_meta_name_is_djangos_name_of_the_header():
    assert "HTTP_" + HEADER.upper().replace("-", "_") == META_NAME


@pytest.mark.parametrize(
    "value", [None, 1, b"abc", ["abc"], "", "x" * 256, "a b", "a\n", "\x00", "\ud800", "é", "\u0660", '"é"'], ids=ascii
)
def test_a_key_with_anything_but_visible_ascii_is_refused(value):
    for entry in (parse_header, validate_key):
        with pytest.raises(KeyInvalidError):
            entry(value)


@given(visible_keys)
def test_every_visible_key_is_accepted_quoted_or_unquoted(key):
    assert parse_header(quoted(key)) == validate_key(key) == key


@given(st.lists(visible_keys.filter(lambda key: key[0] != '"'), min_size=2, max_size=3), st.sampled_from([",", ", "]))
def test_headers_that_a_server_joined_are_refused(keys, joint):
    for spelling in (keys, [quoted(key) for key in keys]):
        with pytest.raises(KeyInvalidError):
            parse_header(joint.join(spelling))


def test_a_subclass_of_str_becomes_plain_text():
    class Shouting(str):
        __slots__ = ()

        def __str__(self):
            return self.upper()

    key = validate_key(Shouting("abc"))
    assert (type(key), key) == (str, "abc")


@given(visible_keys)
@example("8e03978e-40d5-43dd-bc93-6894a57f9324")
def test_a_shortened_key_shows_at_most_half_of_it(key):
    shown, _, length = shorten(key).rpartition("… ")
    assert key.startswith(shown)
    assert len(shown) == min(8, len(key) // 2)
    assert length == f"({len(key)} characters)"


# Derived keys: stable for each operation, and unique

SCOPE = Scope("7", "charges.create", "client-key")
TEXT = st.text(max_size=8)


def test_a_derived_key_is_a_stable_version_8_uuid_without_the_clients_key():
    """A provider has received it, so a different key would be another payment."""
    derived = SCOPE.derive_key("provider.charge")
    assert derived == UUID("2fb6d6f9-1cde-8c30-b4b9-0ca0f3da0acd")
    assert (derived.version, derived.variant) == (8, "specified in RFC 4122")
    assert SCOPE.derive_text("provider.charge") == "2fb6d6f91cde5c30f4b90ca0f3da0acd"
    assert SCOPE.idempotency_key.encode().hex() not in SCOPE.derive_text("provider.charge", 64)


def test_every_derived_key_fits_the_uuid_type_of_every_database():
    """MariaDB refuses a version 8 UUID whose ninth byte is 0x80, which would be one in 64."""
    derived = [SCOPE.derive_key(f"call {number}") for number in range(2000)]
    assert {key.bytes[8] for key in derived} == set(range(0x81, 0xC0))
    assert len(set(derived)) == len(derived)


def test_a_derived_text_has_16_to_64_digits():
    longest = SCOPE.derive_text("provider.charge", 64)
    for length in (16, 32, 64):
        assert SCOPE.derive_text("provider.charge", length) == longest[:length]
    for length in (0, 15, 65):
        with pytest.raises(ValueError, match="between 16 and 64"):
            SCOPE.derive_text("provider.charge", length)


@pytest.mark.parametrize("name", ["", None, 7])
def test_a_derived_key_needs_a_name(name):
    with pytest.raises(ValueError, match="must be a non-empty str"):
        SCOPE.derive_key(name)


@given(one=st.tuples(TEXT, TEXT, TEXT, TEXT.filter(bool)), other=st.tuples(TEXT, TEXT, TEXT, TEXT.filter(bool)))
@example(one=("a", "b", "cd", "e"), other=("a", "bc", "d", "e"))
@example(one=("a", "b", "c", "de"), other=("a", "b", "cd", "e"))
def test_no_two_operations_or_calls_share_a_key(one, other):
    same = Scope(*one[:3]).derive_key(one[3]) == Scope(*other[:3]).derive_key(other[3])
    assert same == (one == other)


def test_a_chain_of_hops_has_one_trace_and_a_separate_key_for_each_hop():
    first = Scope("1", "orders.create", "client-key")
    second = Scope("1", "orders.ship", first.key_for(first.derive_key("ship")))
    third = Scope("1", "orders.mail", second.key_for(second.derive_key("mail")))
    assert first.trace == second.trace == third.trace
    assert len({scope.idempotency_key for scope in (first, second, third)}) == 3
    assert re.fullmatch(r"[0-9a-f]{32}", first.trace)
    assert "client-key" not in third.idempotency_key


@pytest.mark.parametrize("key", ["k", "a.b", f"{'A' * 32}.{'0' * 36}", f"{'a' * 32}.{'0' * 35}"])
def test_any_other_key_starts_a_new_trace(key):
    scope = Scope("1", "orders.create", key)
    assert scope.trace == scope.derive_text("trace")
    assert scope.trace != Scope("2", "orders.create", key).trace


# Keys with a timestamp


@pytest.mark.parametrize(
    ("key", "moment"),
    [
        ("017F22E2-79B0-7CC3-98C4-DC0C0C07398F", 1645557742.0),  # the example of RFC 9562
        ("017f22e2-79b0-7cc3-98c4-dc0c0c07398f", 1645557742.0),
        ("01ARZ3NDEKTSV4RRFFQ69G5FAV", 1469922850.259),  # the example in the ULID specification
        ("01arz3ndektsv4rrffq69g5fav", 1469922850.259),
        ("7ZZZZZZZZZZZZZZZZZZZZZZZZZ", (2**48 - 1) / 1000),
        ("8ZZZZZZZZZZZZZZZZZZZZZZZZZ", None),  # more than 48 bits of time
        ("01ARZ3NDEKTSV4RRFFQ69G5FAU", None),  # U is not a digit
        ("017f22e279b07cc398c4dc0c0c07398f", None),
        ("017f22e2-79b0-7cc3-c8c4-dc0c0c07398f", None),  # another variant
        ("017f22e2-79b0-7cc3-98c4-dc0c0c07398f-1", None),
        ("01A\N{KELVIN SIGN}Z3NDEKTSV4RRFFQ69G5FAV", None),  # not K, although its lower case is k
        ("d5b6cf02-e68b-11f1-9872-02fc00000001", None),  # version 1
        ("18817113-3f18-4cae-8b73-d79cc9739af9", None),  # version 4
        ("order-71", None),
        ("", None),
    ],
)
def test_the_time_of_a_key_is_read_from_uuid7_and_ulid_only(key, moment):
    assert time_of(key) == moment
