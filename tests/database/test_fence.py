"""A change to an owned record must match the scope, the row, the attempt and the fingerprint.

A database crash can lose a claim that was not synced to disk, and another claim can then get its id and attempt. A
claimant that survived the crash then differs from that claim only in the scope or the payload.
"""

from functools import partial

import pytest
from django.db import transaction

from idempotency.bodies import encode_body
from idempotency.exceptions import LeaseLostError
from idempotency.identity.fingerprint import Payload
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.outcome import Outcome
from idempotency.protocol import ownership
from idempotency.protocol.renewal import renew
from idempotency.store import store_for
from tests.database.claiming import OUTCOME, acquire, plain
from tests.records import HOUR, from_now

pytestmark = pytest.mark.django_db(transaction=True)

DAY = 24 * HOUR

#: The one part in which the stored claim differs from the owner's.
OTHERS = [
    # Citus distributes by account, and refuses to change it.
    pytest.param({"account_id": "2"}, id="account", marks=pytest.mark.except_citus),
    pytest.param({"operation": "tests.fence.other"}, id="operation"),
    pytest.param({"idempotency_key": "other"}, id="key"),
    pytest.param({"request_hash": Payload({"amount": 2}).request_hash}, id="payload"),
    pytest.param({"id": 10**9}, id="id"),
    pytest.param({"attempt": 2}, id="attempt"),
]


#: The possible outcomes of an attempt. All are fenced alike.
OUTCOMES = {
    "201": OUTCOME,
    "402": Outcome(402, (), "{}"),
    "422, no JSON": Outcome(422, (("Content-Type", "text/plain"),), encode_body(b"no", "text/plain")),
    "503": Outcome(503, (), "{}"),
    "a reference": Outcome(201, (), reference="1"),
    "a reference to a refusal": Outcome(409, (), "{}", reference="1", body_retention=HOUR),
}


def complete(owned, outcome=OUTCOME):
    try:
        ownership.record(owned, outcome)
    except LeaseLostError:
        return False
    return True


def complete_inside(owned, outcome):
    """Complete in the attempt's transaction, and send COMMIT with it."""
    try:
        with transaction.atomic(durable=True):
            ownership.complete(owned, outcome, commit=True)
    except LeaseLostError:
        return False
    return True


#: Changes by the owner of a claim.
CHANGES = {
    **{f"complete, {name}": partial(complete, outcome=outcome) for name, outcome in OUTCOMES.items()},
    **{f"complete inside, {name}": partial(complete_inside, outcome=outcome) for name, outcome in OUTCOMES.items()},
    "release": ownership.release,
    "park": ownership.park,
    "renew": renew,
    "postpone": lambda owned: ownership.postpone(owned, HOUR),
    "leave session": lambda owned: owned.store.leave_session(owned.fence, HOUR, retention=DAY),
}


def by_a_request(answer):
    """A change by a request that reads the record after its lease and retention have ended."""

    def read(owned):
        IdempotencyRecord.objects.update(lease_expires_at=from_now(-HOUR), expires_at=from_now(-HOUR))
        store = store_for("default")
        return partial(answer, store, store.read(owned.scope).fence)

    return read


def of_a_gone_session(owned):
    """A request finds that the session of a live claim is gone. Only PostgreSQL shows that."""
    IdempotencyRecord.objects.update(session=0)
    return partial(owned.store.end_lease_of_gone_session, owned.fence)


#: Changes by other requests. Each is called with the claim when the request reads it, and returns the change.
ANSWERS = {
    "take over": by_a_request(
        lambda store, seen: store.take_over(seen, lease=HOUR, retention=DAY, undone_by_crash=True)
    ),
    "start over": by_a_request(
        lambda store, seen: store.start_over(seen, "v1:1", lease=HOUR, retention=DAY, undone_by_crash=True)
    ),
    "park abandoned": by_a_request(lambda store, seen: store.park_abandoned(seen)),
}
EVERY = {name: partial(partial, change) for name, change in CHANGES.items()} | ANSWERS
EVERY["end the lease of a gone session"] = of_a_gone_session


def row():
    return IdempotencyRecord.objects.values().get()


def only_claims_in_progress_have_a_lease():
    records = IdempotencyRecord.objects.values_list("status", "lease_expires_at")
    return all((lease is not None) is (status == Status.IN_PROGRESS) for status, lease in records)


@pytest.mark.failure_7
@pytest.mark.failure_8
@pytest.mark.scenario_24
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("prepare", EVERY.values(), ids=EVERY)
def test_no_change_reaches_a_claim_that_differs_in_one_part(prepare, other):
    change = prepare(acquire(plain))
    IdempotencyRecord.objects.update(**other)
    before = row()
    assert not change()
    assert row() == before


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_owner_changes_nothing_after_the_end_of_its_attempt(change):
    owner = acquire(plain)
    assert complete(owner)
    before = row()
    change(owner)
    assert row() == before


def test_an_overtaken_owner_has_not_recorded_its_successors_outcome():
    """An attempt finds its own outcome after a COMMIT without an answer. This one only equals it."""
    late = acquire(plain)
    IdempotencyRecord.objects.update(lease_expires_at=from_now(-HOUR))
    assert complete(acquire(plain))
    assert not complete(late)


def update(**fields):
    """Change the record as an operator's SQL statement would."""
    return lambda owned: IdempotencyRecord.objects.update(**fields)


#: What may happen to a claim after a request has read it and before the request changes it.
SETTLED = {
    "renewed": renew,
    "completed": complete,
    "parked": ownership.park,
    "a lease beyond the retention": update(lease_expires_at=from_now(HOUR)),
    "completed by hand": update(status=Status.COMPLETED, expires_at=from_now(HOUR)),
}


@pytest.mark.parametrize("settle", SETTLED.values(), ids=SETTLED)
@pytest.mark.parametrize("read", ANSWERS.values(), ids=ANSWERS)
def test_a_request_changes_no_claim_whose_owner_was_only_late(read, settle):
    owned = acquire(plain)
    answer = read(owned)
    assert settle(owned)
    before = row()
    assert not answer()
    assert row() == before


@pytest.mark.parametrize("read", ANSWERS.values(), ids=ANSWERS)
def test_one_of_two_readers_of_a_claim_gets_it(read):
    answer = read(acquire(plain))
    assert [answer() for _ in range(2)] == [True, False]
    assert only_claims_in_progress_have_a_lease()


def test_an_owner_overtaken_before_its_transaction_can_not_renew_in_it():
    """Where only one transaction can write at a time, the lease is read and not renewed."""
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
    ended = [name for name in CHANGES if name.startswith(("complete", "release", "park"))]
    assert IdempotencyRecord.objects.exclude(status=Status.IN_PROGRESS).count() == len(ended)
    assert only_claims_in_progress_have_a_lease()
