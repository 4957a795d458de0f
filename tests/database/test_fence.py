"""Who may change a record, and where it is looked for: the fence of an attempt, and the writer's database."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import transaction
from django.test import override_settings
from django.utils.connection import ConnectionDoesNotExist

from idempotency import Operation
from idempotency.exceptions import InProgressError, LeaseLostError
from idempotency.identity.fingerprint import Payload
from idempotency.identity.scope import Scope
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.outcome import Outcome
from idempotency.protocol import claims
from idempotency.protocol.ownership import Ownership
from idempotency.protocol.renewal import renew
from idempotency.upkeep.retention import purge_once
from idempotency.upkeep.stats import stats
from idempotency.upkeep.sweep import recover_once

pytestmark = pytest.mark.django_db(transaction=True)

operation = Operation("tests.fence")
SCOPE = Scope("1", operation.name, "k")
PAYLOAD = Payload({"amount": 1})
OUTCOME = Outcome(status=201, body="{}")


def acquire() -> Any:
    return claims.acquire(operation, SCOPE, PAYLOAD)


def row() -> tuple[int, str, int]:
    return IdempotencyRecord.objects.values_list("pk", "status", "attempt").get()


@pytest.mark.failure_mode(7, 8)
def test_an_attempt_whose_record_was_purged_and_made_anew_can_neither_end_nor_free_it() -> None:
    """The attempts of both are number 1: the row's id is what tells them apart."""
    late: Ownership = acquire()
    IdempotencyRecord.objects.all().delete()
    owner: Ownership = acquire()
    assert (late.attempt, owner.attempt) == (1, 1)
    with pytest.raises(LeaseLostError):
        claims.record(late, OUTCOME)
    assert not claims.release(late)
    assert not claims.park(late)
    assert not renew(late)
    assert row() == (owner.record_id, Status.IN_PROGRESS, 1)
    claims.record(owner, OUTCOME)
    assert not claims.release(late)
    assert row() == (owner.record_id, Status.COMPLETED, 1)


@pytest.mark.failure_mode(14)
def test_a_claim_that_loses_leaves_the_connection_as_it_was() -> None:
    acquire()
    with pytest.raises(InProgressError):
        acquire()
    with transaction.atomic():
        assert IdempotencyRecord.objects.count() == 1


class LaggingReplica:
    """Reads go to a replica, which here is none: whoever asks it finds out."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return "replica"

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "default"


@pytest.mark.failure_mode(28)
def test_nothing_about_a_record_is_read_from_a_replica() -> None:
    with override_settings(DATABASE_ROUTERS=[LaggingReplica()]):
        with pytest.raises(ConnectionDoesNotExist):
            IdempotencyRecord.objects.count()
        claim: Ownership = acquire()
        with pytest.raises(InProgressError):
            acquire()
        renew(claim)
        claims.record(claim, OUTCOME)
        assert acquire().status == 201
        assert recover_once().touched == 0
        assert purge_once().deleted == 0
        assert stats().records.value == 1
