"""The stand-in payment provider on its own: its ledger, its faults, and how it begins and ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from testproject.harness.processes import answers
from testproject.provider import Effect, effects_by_key, read_ledger, running_provider
from testproject.provider.client import PayoutRefusedError, ProviderFailedError, find, pay
from testproject.provider.ledger import Ledger
from tests.providers import IMPATIENCE, PAID, PATIENCE, UNPAID, eventually, raw

ROOT = Path(__file__).resolve().parent.parent

OWNER_THAT_IS_KILLED = """
import os, signal, sys
from testproject.provider import running_provider
with running_provider(sys.argv[1]) as address:
    print(address, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("provider") / "ledger.jsonl"


@pytest.fixture(scope="module")
def provider(ledger: Path) -> Iterator[str]:
    """A provider that never deduplicates. Tests share it, and look at the effects of their own keys or labels."""
    with running_provider(ledger) as address:
        yield address


@pytest.fixture(scope="module")
def deduplicating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    path = tmp_path_factory.mktemp("deduplicating") / "ledger.jsonl"
    with running_provider(path, deduplicate=True) as address:
        yield address, path


def paid(ledger: Path, key: str) -> int:
    return len(effects_by_key(read_ledger(ledger)).get(key, []))


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


def test_each_request_pays_unless_it_deduplicates(provider: str, ledger: Path, deduplicating: tuple[str, Path]) -> None:
    key = uuid4().hex
    first, second = (pay(provider, key, label="l", amount=5, timeout=PATIENCE) for _ in range(2))
    assert first.id != second.id
    assert paid(ledger, key) == 2
    address, path = deduplicating
    assert len({pay(address, key, label="l", amount=5, timeout=PATIENCE) for _ in range(2)}) == 1
    assert paid(path, key) == 1
    with pytest.raises(ProviderFailedError, match="409"):
        pay(address, key, label="l", amount=6, timeout=PATIENCE)


def test_simultaneous_requests_of_one_key_are_deduplicated(deduplicating: tuple[str, Path]) -> None:
    address, path = deduplicating
    key = uuid4().hex
    barrier = threading.Barrier(8)

    def call(_: int) -> Effect:
        barrier.wait(PATIENCE)
        return pay(address, key, label="l", amount=5, timeout=PATIENCE)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(call, range(8)))) == 1
    assert paid(path, key) == 1


def test_it_can_be_asked_for_a_payout(provider: str) -> None:
    key = f"a b/{uuid4()}"
    assert find(provider, key, timeout=PATIENCE) is None
    made = pay(provider, key, label="l", amount=5, timeout=PATIENCE)
    assert find(provider, key, timeout=PATIENCE) == made


@pytest.mark.parametrize("named", [True, False], ids=["labelled", "without a label"])
@pytest.mark.parametrize("fault", [*PAID, *UNPAID])
def test_a_fault_strikes_the_first_call_of_a_payout_only(provider: str, ledger: Path, fault: str, named: bool) -> None:
    key, label, effects = uuid4().hex, uuid4().hex if named else "", int(fault in PAID)
    with pytest.raises(ProviderFailedError):
        pay(provider, key, label=label, amount=5, timeout=IMPATIENCE, fault=fault)
    assert eventually(lambda: paid(ledger, key) == effects)
    pay(provider, key, label=label, amount=5, timeout=PATIENCE, fault=fault)
    assert paid(ledger, key) == effects + 1


def test_a_refusal_is_final(provider: str, ledger: Path) -> None:
    key = uuid4().hex
    for _ in range(2):
        with pytest.raises(PayoutRefusedError):
            pay(provider, key, label="l", amount=5, timeout=PATIENCE, fault="refuse")
    assert paid(ledger, key) == 0


def test_a_call_past_its_time_does_not_pay(provider: str, ledger: Path) -> None:
    key = uuid4().hex
    with pytest.raises(ProviderFailedError, match="410"):
        pay(provider, key, label="l", amount=5, timeout=PATIENCE, valid_until=time.time())
    assert paid(ledger, key) == 0


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"amount": 0}', b'{"amount": 1, "fault": "fire"}', b'{"amount": 1, "label": 1}']
)
def test_what_it_does_not_understand_is_a_400(provider: str, body: bytes) -> None:
    answer = raw(provider, body, "k")
    assert answer.startswith(b"HTTP/1.0 400 ")


def test_it_ends_with_its_owner(tmp_path: Path) -> None:
    owner = subprocess.run(
        [sys.executable, "-c", OWNER_THAT_IS_KILLED, str(tmp_path / "ledger")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert owner.returncode == -signal.SIGKILL
    port = urlsplit(owner.stdout.strip()).port
    assert port is not None
    assert eventually(lambda: not answers(("127.0.0.1", port)))
