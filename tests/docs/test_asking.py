"""The documentation's reconcilers, with the sample's provider and a connection that is cut around a call."""

import json
from contextlib import closing
from datetime import timedelta

import httpx
import pytest

from idempotency import Reconcile, idempotent
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.operate.sweep import recover_batches
from idempotency.protocol.faults import fault_point
from testproject.models import Payout
from testproject.provider.faults import Fault
from testproject.provider.ledger import Ledger
from testproject.provider.server import Provider
from tests.concurrency.failures import Killed
from tests.docs.conftest import post, repeat_in_every_way
from tests.factories import UserFactory
from tests.harness.servers import in_thread
from tests.records import from_now

pytestmark = [pytest.mark.django_db, pytest.mark.once]

PAGE = "how-to/choose-recovery.md"
PROBES = ["find_by_key", "find_by_reference"]


@pytest.fixture
def payouts_provider(tmp_path):
    with closing(Ledger(tmp_path / "ledger")) as ledger, in_thread(Provider(0, ledger, deduplicate=False)) as server:
        yield server


def kill():
    raise Killed


class Cut(httpx.HTTPTransport):
    """Cuts the connection once, before or after the provider receives the call."""

    cut = ""

    def handle_request(self, request):
        cut, self.cut = self.cut, ""
        if cut == "before":
            raise httpx.ConnectError("cut", request=request)
        response = super().handle_request(request)
        if cut == "after":
            response.close()
            raise httpx.ReadError("cut", request=request)
        return response


class Payouts:
    def __init__(self, page, provider, probe, max_attempts=22):
        self.transport = Cut()
        page["provider"]._transport = self.transport
        page["provider"].base_url = f"http://127.0.0.1:{provider.server_address[1]}"
        self.user = UserFactory()
        recovery = Reconcile(page[probe], max_attempts=max_attempts)
        protect = idempotent(f"docs.{probe}", transaction=False, recovery=recovery, lease=page["LEASE"])
        self.view = protect(page["send_payout"].__wrapped__)

    def send(self, *, cut=""):
        self.transport.cut = cut
        return post(self.view, {"amount": 7}, user=self.user)

    def end_lease(self):
        IdempotencyRecord.objects.update(lease_expires_at=from_now(-timedelta(seconds=1)))


@pytest.mark.parametrize("probe", PROBES)
def test_a_payout_whose_answer_was_lost_is_found(probe, run_page, payouts_provider):
    payouts = Payouts(run_page(PAGE), payouts_provider, probe)
    assert payouts.send(cut="after").status_code == 502
    assert payouts.send().status_code == 409  # the claim is kept for the rest of its lease
    payouts.end_lease()
    answers = [payouts.send() for _ in range(2)]
    assert {(answer.status_code, answer.content) for answer in answers} == {(201, b'{"id": 1, "amount": 7}')}
    assert len(payouts_provider.ledger.by_key) == 1


@pytest.mark.parametrize("probe", PROBES)
def test_a_payout_that_never_reached_the_provider_is_made_by_the_retry(probe, run_page, payouts_provider):
    payouts = Payouts(run_page(PAGE), payouts_provider, probe)
    assert payouts.send(cut="before").status_code == 502
    payouts.end_lease()
    assert json.loads(payouts.send().content) == {"id": 1, "amount": 7}
    assert [len(effects) for effects in payouts_provider.ledger.by_key.values()] == [1]


@pytest.mark.failure_111
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("probe", PROBES)
def test_a_payout_is_made_once_and_has_one_row_whoever_writes_it(probe, run_page, payouts_provider, settings):
    payouts = Payouts(run_page(PAGE), payouts_provider, probe)
    # After the retention, the row under the same derived key refuses another one.
    repeat_in_every_way(payouts.view, {"amount": 7}, Payout.objects.all(), settings, leave_out=["expiry"])
    assert {str(payout.key) for payout in Payout.objects.all()} == {*payouts_provider.ledger.by_key}
    assert all(len(effects) == 1 for effects in payouts_provider.ledger.by_key.values())


@pytest.mark.failure_111
@pytest.mark.parametrize("probe", PROBES)
def test_a_reconciler_that_is_killed_after_its_row_writes_no_other_one(probe, run_page, payouts_provider, monkeypatch):
    payouts = Payouts(run_page(PAGE), payouts_provider, probe)
    assert payouts.send(cut="after").status_code == 502
    payouts.end_lease()
    with monkeypatch.context() as patch:
        patch.setitem(fault_point, "reconcile.found", kill)
        with pytest.raises(Killed):
            payouts.send()
    assert Payout.objects.count() == 1
    payouts.end_lease()
    assert payouts.send().status_code == 201
    assert Payout.objects.count() == 1


def test_a_reference_that_was_paid_twice_is_parked(run_page, payouts_provider):
    payouts = Payouts(run_page(PAGE), payouts_provider, "find_by_reference", max_attempts=2)
    assert payouts.send(cut="after").status_code == 502
    (effect,) = next(iter(payouts_provider.ledger.by_key.values()))
    payouts_provider.ledger.append("another key", effect.label, effect.amount, effect.time)
    payouts.end_lease()
    next(recover_batches())
    assert IdempotencyRecord.objects.get().status == Status.PARKED


def test_a_refusal_by_the_provider_is_an_outcome(run_page, payouts_provider, monkeypatch):
    payouts = Payouts(run_page(PAGE), payouts_provider, "find_by_key")
    monkeypatch.setattr(payouts_provider, "fault_of", lambda payout, asked_for: Fault.REFUSE)
    answers = [payouts.send() for _ in range(2)]
    assert [answer.status_code for answer in answers] == [402, 402]
    assert "Idempotency-Replayed" in answers[1]
