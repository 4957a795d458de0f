"""The stand-in payment provider on its own: its ledger and its faults."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest

from testproject.provider import Effect, Provider, read_ledger
from testproject.provider.client import PayoutRefusedError, ProviderFailedError, find, pay
from testproject.provider.ledger import Ledger
from tests.concurrency.racing import race
from tests.providers import IMPATIENCE, PAID, PATIENCE, UNPAID, eventually


@pytest.fixture
def provider(providers: dict[bool, Provider]) -> Provider:
    """One that never deduplicates."""
    return providers[False]


def paid(provider: Provider, key: str) -> int:
    return [effect.key for effect in provider.effects()].count(key)


# The ledger


def test_an_effect_is_in_the_file_when_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    assert read_ledger(path) == []
    with closing(Ledger(path)) as ledger:
        told = ledger.append("k", "l", 5, 1.5)
    assert told == Effect(id=1, key="k", label="l", amount=5, time=1.5)
    assert read_ledger(path) == [told]


def test_a_line_that_a_crash_cut_off_is_no_effect_and_is_not_written_into(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with closing(Ledger(path)) as ledger:
        whole = ledger.append("k", "", 5, 0)
    with path.open("ab") as file:
        file.write(b'{"id": 2, "key": "torn')
    assert read_ledger(path) == [whole]
    with closing(Ledger(path)) as ledger:
        assert ledger.by_key == {"k": [whole]}
        after = ledger.append("next", "", 6, 0)
    assert read_ledger(path) == [whole, after]
    assert after.id == 2


# The provider


def test_each_request_pays_unless_it_deduplicates(providers: dict[bool, Provider]) -> None:
    key = uuid4().hex
    for deduplicate, provider in providers.items():
        effects = 1 if deduplicate else 2
        assert len({pay(provider.url, key, label="l", amount=5, timeout=PATIENCE).id for _ in range(2)}) == effects
        assert paid(provider, key) == effects
    with pytest.raises(ProviderFailedError, match="409"):
        pay(providers[True].url, key, label="l", amount=6, timeout=PATIENCE)


def test_simultaneous_requests_of_one_key_are_deduplicated(providers: dict[bool, Provider]) -> None:
    key = uuid4().hex
    call = partial(pay, providers[True].url, key, label="l", amount=5, timeout=PATIENCE)
    assert len(set(race([call] * 8))) == 1
    assert paid(providers[True], key) == 1


def test_it_can_be_asked_for_a_payout(provider: Provider) -> None:
    key = f"a b/{uuid4()}"
    assert find(provider.url, key, timeout=PATIENCE) is None
    made = pay(provider.url, key, label="l", amount=5, timeout=PATIENCE)
    assert find(provider.url, key, timeout=PATIENCE) == made


@pytest.mark.parametrize(("fault", "named"), [*((fault, True) for fault in (*PAID, *UNPAID)), ("error_before", False)])
def test_a_fault_strikes_the_first_call_of_a_payout_only(provider: Provider, fault: str, named: bool) -> None:
    """Of a label, or of a key if there is no label."""
    key, label, effects = uuid4().hex, uuid4().hex if named else "", int(fault in PAID)
    with pytest.raises(ProviderFailedError):
        pay(provider.url, key, label=label, amount=5, timeout=IMPATIENCE, fault=fault)
    assert eventually(lambda: paid(provider, key) == effects)
    pay(provider.url, key, label=label, amount=5, timeout=PATIENCE, fault=fault)
    assert paid(provider, key) == effects + 1


def test_a_refusal_is_final(provider: Provider) -> None:
    key = uuid4().hex
    for _ in range(2):
        with pytest.raises(PayoutRefusedError):
            pay(provider.url, key, label="l", amount=5, timeout=PATIENCE, fault="refuse")
    assert paid(provider, key) == 0
