"""Derived keys: the same for one operation for ever, and for no two."""

from __future__ import annotations

import re
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idempotency.exceptions import AccountRequiredError
from idempotency.identity.scope import Scope, scope_of

SCOPE = Scope("7", "charges.create", "client-key")
TEXT = st.text(max_size=8)


def test_a_derived_key_never_changes_between_releases() -> None:
    """A provider has seen it: another one would be another payment."""
    assert SCOPE.derive_key("provider.charge") == UUID("2fb6d6f9-1cde-8c30-b4b9-0ca0f3da0acd")
    assert SCOPE.derive_text("provider.charge") == "2fb6d6f91cde5c30f4b90ca0f3da0acd"


def test_every_derived_key_fits_every_databases_type_for_uuids() -> None:
    """MariaDB refuses one of version 8 whose ninth byte is 0x80, which would be one in 64."""
    derived = [SCOPE.derive_key(f"call {number}") for number in range(2000)]
    assert {key.bytes[8] for key in derived} == set(range(0x81, 0xC0))
    assert len(set(derived)) == len(derived)


def test_a_derived_key_is_a_version_8_uuid_that_hides_the_clients_key() -> None:
    derived = SCOPE.derive_key("provider.charge")
    assert (derived.version, derived.variant) == (8, "specified in RFC 4122")
    assert "client-key" not in str(derived)
    assert SCOPE.idempotency_key.encode().hex() not in SCOPE.derive_text("provider.charge", 64)


@pytest.mark.parametrize("length", [16, 32, 64])
def test_the_text_form_fits_a_providers_limit(length: int) -> None:
    text = SCOPE.derive_text("provider.charge", length)
    assert len(text) == length
    assert SCOPE.derive_text("provider.charge", 64).startswith(text)


@pytest.mark.parametrize("length", [0, 15, 65])
def test_a_text_form_too_short_to_be_unique_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="between 16 and 64"):
        SCOPE.derive_text("provider.charge", length)


@pytest.mark.parametrize("name", ["", None, 7])
def test_a_derived_key_needs_a_name(name: str) -> None:
    with pytest.raises(ValueError, match="name of its call"):
        SCOPE.derive_key(name)


@given(one=st.tuples(TEXT, TEXT, TEXT, TEXT.filter(bool)), other=st.tuples(TEXT, TEXT, TEXT, TEXT.filter(bool)))
def test_no_two_operations_or_calls_share_a_key(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    same = Scope(*one[:3]).derive_key(one[3]) == Scope(*other[:3]).derive_key(other[3])
    assert same == (one == other)


def test_nothing_collides_by_concatenation() -> None:
    assert Scope("a", "b", "cd").derive_key("e") != Scope("a", "bc", "d").derive_key("e")
    assert Scope("a", "b", "c").derive_key("de") != Scope("a", "b", "cd").derive_key("e")


@pytest.mark.parametrize("account", [None, "", "x" * 256, "a\x00", "\ud800", "a\nb"])
def test_an_account_that_can_not_be_stored_is_refused(account: str | None) -> None:
    with pytest.raises(AccountRequiredError):
        scope_of("charges.create", account, "k")


def test_an_account_that_is_not_text_is_the_developers_mistake() -> None:
    with pytest.raises(TypeError, match="must be a str or None, not int"):
        scope_of("charges.create", 7, "k")  # type: ignore[arg-type]


def test_a_chain_of_hops_has_one_trace_and_each_hop_a_key_of_its_own() -> None:
    first = Scope("1", "orders.create", "client-key")
    second = Scope("1", "orders.ship", first.key_for(first.derive_key("ship")))
    third = Scope("1", "orders.mail", second.key_for(second.derive_key("mail")))
    assert first.trace == second.trace == third.trace
    assert len({scope.idempotency_key for scope in (first, second, third)}) == 3
    assert re.fullmatch(r"[0-9a-f]{32}", first.trace)
    assert "client-key" not in third.idempotency_key


@pytest.mark.parametrize("key", ["k", "a.b", f"{'A' * 32}.{'0' * 36}", f"{'a' * 32}.{'0' * 35}"])
def test_another_key_begins_a_trace_of_its_own(key: str) -> None:
    scope = Scope("1", "orders.create", key)
    assert scope.trace == scope.derive_text("trace")
    assert scope.trace != Scope("2", "orders.create", key).trace
