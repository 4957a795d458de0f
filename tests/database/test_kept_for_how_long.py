"""Retention is counted from the latest change of a record's owner or outcome."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from idempotency import PARK, Completed, Operation, Reconcile
from idempotency.identity.fingerprint import Payload
from idempotency.identity.scope import Scope
from idempotency.models import IdempotencyRecord
from idempotency.outcome import Outcome
from idempotency.protocol import claims
from idempotency.protocol.execution import acquire_or_wait
from idempotency.protocol.ownership import Ownership
from idempotency.protocol.renewal import renew
from idempotency.upkeep.resolutions import record_outcome
from idempotency.upkeep.retention import purge_once
from tests.records import HOUR, MINUTE, database_now, from_now

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_mode(69)]

TTL = timedelta(days=2)
OUTCOME = Outcome(201, (), "{}")

plain = Operation("tests.kept.plain", ttl=TTL)
asks = Operation(
    "tests.kept.asks", ttl=TTL, transaction=False, recovery=Reconcile(lambda record: Completed({"found": True}))
)
parks = Operation("tests.kept.parks", ttl=TTL, transaction=False, recovery=PARK)


def acquire(operation: Operation) -> Ownership:
    held = claims.acquire(operation, Scope("1", operation.name, "k"), Payload("x"))
    assert isinstance(held, Ownership)
    return held


def almost_over(**changes: object) -> None:
    """Bring the record to the end of its retention."""
    IdempotencyRecord.objects.update(expires_at=from_now(MINUTE), **changes)


def is_kept_for_the_whole_retention() -> bool:
    return timedelta(0) <= TTL - (IdempotencyRecord.objects.get().expires_at - database_now()) < MINUTE


def test_a_late_outcome() -> None:
    owned = acquire(plain)
    IdempotencyRecord.objects.update(expires_at=from_now(-HOUR))
    claims.record(owned, OUTCOME)
    assert is_kept_for_the_whole_retention()
    assert purge_once().deleted == 0
    assert claims.acquire(plain, owned.scope, Payload("x")) == OUTCOME


@pytest.mark.parametrize("prolong", [renew, lambda owned: claims.postpone(owned, HOUR)], ids=["renewed", "postponed"])
def test_a_prolonged_lease(prolong: Callable[[Ownership], bool]) -> None:
    owned = acquire(asks)
    almost_over()
    assert prolong(owned)
    assert is_kept_for_the_whole_retention()


def test_a_take_over() -> None:
    acquire(plain)
    almost_over(lease_expires_at=from_now(-HOUR))
    assert acquire(plain).attempt == 2
    assert is_kept_for_the_whole_retention()


def test_an_outcome_that_a_reconciler_finds() -> None:
    owned = acquire(asks)
    almost_over(lease_expires_at=from_now(-HOUR))
    assert isinstance(acquire_or_wait(asks, owned.scope, Payload("x")), Outcome)
    assert is_kept_for_the_whole_retention()


def test_an_outcome_that_an_operator_records() -> None:
    claims.park(acquire(parks))
    almost_over()
    record_outcome(IdempotencyRecord.objects.get(), {"found": True}, by="ops")
    assert is_kept_for_the_whole_retention()


def test_a_retention_that_ends_later_by_an_earlier_policy_stays() -> None:
    owned = acquire(plain)
    IdempotencyRecord.objects.update(expires_at=from_now(10 * TTL))
    claims.record(owned, OUTCOME)
    assert IdempotencyRecord.objects.get().expires_at - database_now() > 9 * TTL


def test_nothing_is_kept_longer_because_somebody_looked() -> None:
    owned = acquire(plain)
    claims.record(owned, OUTCOME)
    almost_over()
    claims.acquire(plain, owned.scope, Payload("x"))
    assert not is_kept_for_the_whole_retention()
