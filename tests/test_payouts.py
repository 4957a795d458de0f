"""Payouts in the sample project: one at the provider and one row here, wherever the process is interrupted."""

import time
from contextlib import closing
from unittest.mock import Mock
from uuid import uuid4

import pytest

from idempotency.operate.sweep import recover_batches
from testproject import payouts
from testproject.models import Payout
from testproject.provider import Effect, read_ledger
from testproject.provider.client import ProviderFailedError, find, pay
from testproject.provider.ledger import Ledger
from tests.concurrency.failures import UNKNOWN, Killed, problem
from tests.concurrency.traces import end_lease, record
from tests.factories import UserFactory
from tests.http.callers import Caller
from tests.providers import HANGING, IMPATIENCE, PAID, PATIENCE, UNPAID, eventually

# ``tests/concurrency`` tests each recovery on each database. These tests add a provider.
pytestmark = pytest.mark.once


RECONCILED, REEXECUTED, PARKED = "/payouts/", "/payouts/reexecute/", "/payouts/park/"


class Payouts(Caller):
    """A client that requests one payout under one key, and the payout's effects."""

    def __init__(self, providers, settings):
        super().__init__(UserFactory())
        self.label = uuid4().hex
        self.providers = providers
        self._settings = settings
        self._is_faulty = True

    def pay(self, path, fault=""):
        # Only the first call is faulty. Every other call is answered, even on a busy machine.
        self._settings.PROVIDER_TIMEOUT = IMPATIENCE if fault in HANGING and self._is_faulty else PATIENCE
        self._is_faulty = False
        return self.post(path, {"amount": 1000, "label": self.label, "fault": fault}, key=self.label)

    def effects(self):
        made = (effect for provider in self.providers.values() for effect in provider.effects())
        return [effect for effect in made if effect.label == self.label]

    def counts(self):
        """The number of payouts made, and of rows that record them."""
        return len(self.effects()), Payout.objects.filter(label=self.label).count()

    def end_lease(self):
        end_lease(self.label)

    def derived_key(self):
        return str(record(self.label).derive_key(payouts.CALL))


@pytest.fixture
def payout(transactional_db, settings, providers):
    settings.PROVIDER_URL, settings.DEDUPLICATING_PROVIDER_URL = providers[False].url, providers[True].url
    return Payouts(providers, settings)


@pytest.mark.parametrize("path", [RECONCILED, REEXECUTED, PARKED])
def test_a_payout_is_made_under_the_derived_key_and_replayed(payout, path):
    first, retry = payout.pay(path), payout.pay(path)
    assert (first.status_code, retry.content, retry["Idempotency-Replayed"]) == (201, first.content, "true")
    (effect,), row = payout.effects(), Payout.objects.get()
    assert effect.key == str(row.key) == payout.derived_key()
    assert first.json() == {"id": row.pk, "provider_id": effect.id, "label": payout.label, "amount": 1000}
    assert payout.label not in effect.key, "the provider received the client's key"


@pytest.mark.parametrize("path", [RECONCILED, REEXECUTED, PARKED])
def test_a_refused_payout_is_a_recorded_402(payout, path):
    answers = [payout.pay(path, fault="refuse") for _ in range(2)]
    assert [(answer.status_code, answer.json()["code"]) for answer in answers] == [(402, "payout_refused")] * 2
    assert answers[1]["Idempotency-Replayed"] == "true"
    assert payout.counts() == (0, 0)


@pytest.mark.scenario_3
@pytest.mark.parametrize(("path", "swept"), [(RECONCILED, 0), (RECONCILED, 1), (REEXECUTED, 0)])
def test_a_process_killed_after_the_payment_pays_once(payout, monkeypatch, path, swept):
    with monkeypatch.context() as patched:
        patched.setattr(payouts, "_created", Mock(side_effect=Killed))
        with pytest.raises(Killed):
            payout.pay(path)
    assert payout.counts() == (1, 0)
    payout.end_lease()
    if swept:  # before a retry
        assert next(recover_batches()).completed == 1
        assert payout.counts() == (1, 1)
    answers = [payout.pay(path) for _ in range(3)]
    assert {(answer.status_code, answer.content) for answer in answers} == {(201, answers[0].content)}
    assert answers[0].json()["provider_id"] == payout.effects()[0].id
    assert payout.counts() == (1, 1)


@pytest.mark.scenario_3
@pytest.mark.parametrize(
    ("fault", "path", "effects"),
    [
        *(("error_after_success", path, 1) for path in (REEXECUTED, RECONCILED, PARKED)),
        *(("error_before", path, 0) for path in (REEXECUTED, RECONCILED)),
        # Each of these waits for the whole timeout.
        *(("succeed_then_hang", REEXECUTED, 1), ("late", RECONCILED, 1), ("hang", RECONCILED, 0)),
    ],
)
def test_a_call_that_failed_is_repeated_only_if_nothing_was_paid(payout, fault, path, effects):
    first = payout.pay(path, fault=fault)
    assert (first.status_code, first.json()["code"]) == (502, "provider_failed")
    assert eventually(lambda: len(payout.effects()) == effects)
    if path == PARKED:
        assert problem(payout.pay(path, fault=fault)) == UNKNOWN
        assert payout.counts() == (1, 0)
        return
    if path == RECONCILED:
        assert payout.pay(path, fault=fault).json()["code"] == "idempotency_in_progress"
        payout.end_lease()
    assert payout.pay(path, fault=fault).status_code == 201
    assert payout.counts() == (1, 1)


def test_the_call_is_valid_only_for_a_part_of_the_lease(payout, monkeypatch):
    seen = []

    def pay_late(*args, valid_until, **options):
        seen.append(valid_until)
        return pay(*args, valid_until=valid_until, **options)

    monkeypatch.setattr(payouts, "pay", pay_late)
    before = time.time()
    assert payout.pay(RECONCILED).status_code == 201
    assert before + 30 <= seen[0] <= time.time() + 30  # the lease is a minute


# The stand-in provider: its ledger and its faults


@pytest.fixture
def provider(providers):
    """The provider that never deduplicates."""
    return providers[False]


def paid(provider, key):
    return [effect.key for effect in provider.effects()].count(key)


def test_an_effect_is_in_the_file_once_reported_and_a_torn_line_is_ignored(tmp_path):
    path = tmp_path / "ledger"
    assert read_ledger(path) == []
    with closing(Ledger(path)) as ledger:
        whole = ledger.append("k", "l", 5, 1.5)
        assert read_ledger(path) == [whole] == [Effect(id=1, key="k", label="l", amount=5, time=1.5)]
    with path.open("ab") as file:
        file.write(b'{"id": 2, "key": "torn')
    assert read_ledger(path) == [whole]
    with closing(Ledger(path)) as ledger:
        assert ledger.by_key == {"k": [whole]}
        after = ledger.append("next", "", 6, 0)
    assert read_ledger(path) == [whole, after]
    assert after.id == 2


def test_each_request_pays_unless_the_provider_deduplicates(providers):
    key = uuid4().hex
    for deduplicate, provider in providers.items():
        effects = 1 if deduplicate else 2
        assert len({pay(provider.url, key, label="l", amount=5, timeout=PATIENCE).id for _ in range(2)}) == effects
        assert paid(provider, key) == effects
    with pytest.raises(ProviderFailedError, match="409"):
        pay(providers[True].url, key, label="l", amount=6, timeout=PATIENCE)


def test_a_payout_can_be_found_by_its_key(provider):
    key = f"a b/{uuid4()}"
    assert find(provider.url, key, timeout=PATIENCE) is None
    made = pay(provider.url, key, label="l", amount=5, timeout=PATIENCE)
    assert find(provider.url, key, timeout=PATIENCE) == made


@pytest.mark.parametrize(("fault", "named"), [*((fault, True) for fault in (*PAID, *UNPAID)), ("error_before", False)])
def test_a_fault_affects_only_the_first_call_of_a_payout(provider, fault, named):
    """A payout is identified by its label, or by its key if it has no label."""
    key, label, effects = uuid4().hex, uuid4().hex if named else "", int(fault in PAID)
    with pytest.raises(ProviderFailedError):
        pay(provider.url, key, label=label, amount=5, timeout=IMPATIENCE, fault=fault)
    assert eventually(lambda: paid(provider, key) == effects)
    pay(provider.url, key, label=label, amount=5, timeout=PATIENCE, fault=fault)
    assert paid(provider, key) == effects + 1
