"""What a change of an owned record must match: the scope, the row, the attempt and the fingerprint, each of them.

A database that crashes can lose a claim that waited for no disk, and give its id and its attempt to another claim. A
claimant that survived the crash then has everything of that claim but the scope or the payload.
"""

import pytest
from django.db import transaction

from idempotency import Operation
from idempotency.exceptions import LeaseLostError
from idempotency.identity.fingerprint import Payload
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.protocol import ownership
from idempotency.protocol.renewal import renew
from idempotency.store import store_for
from tests.database.claiming import OUTCOME, acquire
from tests.records import HOUR, from_now

pytestmark = pytest.mark.django_db(transaction=True)

DAY = 24 * HOUR

plain = Operation("tests.fence.plain")

#: In what the claim differs that has the id and the attempt of the lost one.
OTHERS = {
    "account": {"account_id": "2"},
    "operation": {"operation": "tests.fence.other"},
    "key": {"idempotency_key": "other"},
    "payload": {"request_hash": Payload({"amount": 2}).request_hash},
    "id": {"id": 10**9},
    "attempt": {"attempt": 2},
}


def complete(owned):
    try:
        ownership.record(owned, OUTCOME)
    except LeaseLostError:
        return False
    return True


CHANGES = {
    "complete": complete,
    "release": ownership.release,
    "park": ownership.park,
    "renew": renew,
    "postpone": lambda owned: ownership.postpone(owned, HOUR),
}


def row():
    return IdempotencyRecord.objects.values().get()


@pytest.mark.failure_7
@pytest.mark.failure_8
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_owner_changes_no_claim_that_differs_in_one_part(change, other):
    late = acquire(plain)
    IdempotencyRecord.objects.update(**other)
    before = row()
    assert not change(late)
    assert row() == before


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_owner_changes_nothing_after_the_end_of_its_attempt(change):
    owner = acquire(plain)
    assert complete(owner)
    before = row()
    change(owner)
    assert row() == before


# Who has read a record, and answers a request by a change of it

ANSWERS = {
    "take over": lambda seen: store_for("default").take_over(seen, lease=HOUR, ttl=DAY),
    "start over": lambda seen: store_for("default").start_over(seen, "v1:1", lease=HOUR, ttl=DAY),
    "park": lambda seen: store_for("default").park_abandoned(seen),
}


def read_when_abandoned(owned):
    """The record as a request reads it after the lease, and after the retention."""
    IdempotencyRecord.objects.update(lease_expires_at=from_now(-HOUR), expires_at=from_now(-HOUR))
    seen = store_for("default").read(owned.scope)
    assert seen is not None
    return seen.fence


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_request_changes_only_the_claim_that_it_has_read(answer, other):
    owned = acquire(plain)
    seen = read_when_abandoned(owned)
    IdempotencyRecord.objects.update(**other)
    before = row()
    assert not answer(seen)
    assert row() == before


@pytest.mark.parametrize("settle", [renew, complete])
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_request_changes_no_claim_whose_owner_was_only_late(answer, settle):
    owned = acquire(plain)
    seen = read_when_abandoned(owned)
    assert settle(owned)
    before = row()
    assert not answer(seen)
    assert row() == before


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_one_of_two_that_have_read_the_same_claim_gets_it(answer):
    owned = acquire(plain)
    seen = read_when_abandoned(owned)
    assert [answer(seen) for _ in range(2)] == [True, False]


def test_an_owner_that_was_overtaken_before_its_transaction_renews_nothing_in_it():
    """Where one transaction at a time can write, the lease is read there and not prolonged."""
    late = acquire(plain)
    IdempotencyRecord.objects.update(lease_expires_at=from_now(-HOUR))
    assert acquire(plain).attempt == 2
    with transaction.atomic():
        assert not renew(late)


@pytest.mark.failure_18
def test_an_owner_changes_its_own_claim():
    """Otherwise the tests above could pass without a fence."""
    for number, change in enumerate(CHANGES.values()):
        assert change(acquire(plain, f"key-{number}"))
    assert IdempotencyRecord.objects.filter(status=Status.IN_PROGRESS).count() == 2
