"""Why the latest failed attempt failed is kept with the record, at no cost for those that succeed."""

from __future__ import annotations

from datetime import timedelta

import pytest

from idempotency import PARK, REEXECUTE, Operation, claim
from idempotency.identity.fingerprint import Payload
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.outcome import MAX_REASON, reason_of
from idempotency.protocol.claims import ClaimRequest, acquire
from idempotency.protocol.execution import release_or_park
from idempotency.protocol.ownership import Ownership
from tests.records import expire

pytestmark = pytest.mark.django_db(transaction=True)

OPERATIONS = [
    Operation("tests.error.plain"),
    Operation("tests.error.again", transaction=False, recovery=REEXECUTE),
    Operation("tests.error.parks", transaction=False, recovery=PARK, lease=timedelta(seconds=30)),
]


def record() -> IdempotencyRecord:
    return IdempotencyRecord.objects.get()


def fail(operation: Operation) -> None:
    with pytest.raises(ValueError, match="no such"), claim(operation, account_id="1", key="k"):
        raise ValueError("no such customer")


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_a_failed_attempt_leaves_its_reason(operation: Operation) -> None:
    fail(operation)
    left = Status.PARKED if operation.recovery is OPERATIONS[2].recovery else Status.RECOVERABLE
    assert (record().status, record().error) == (left, "ValueError: no such customer")


def test_a_later_attempt_keeps_it_and_a_new_request_under_the_key_does_not() -> None:
    fail(OPERATIONS[0])
    held = acquire(ClaimRequest(OPERATIONS[0].policy, record().scope, Payload(None)))
    assert isinstance(held, Ownership)
    release_or_park(held)  # no error, but a response that is not recorded
    for _ in range(2):
        with claim(OPERATIONS[0], account_id="1", key="k") as run:
            if not run.replayed:
                run.result = None
    assert (record().status, record().error) == (Status.COMPLETED, "ValueError: no such customer")
    expire(record().pk)
    acquire(ClaimRequest(OPERATIONS[0].policy, record().scope, Payload(None)))
    assert record().error is None


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise TypeError


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UnreadableError(), "UnreadableError"),
        (ValueError("a\x00b\ud800"), "ValueError: a\ufffdb?"),
        (ValueError("x" * 5000), "ValueError: " + "x" * (MAX_REASON - len("ValueError: "))),
        (KeyError(), "KeyError: "),
    ],
)
def test_a_reason_can_be_stored_whatever_the_error_is(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason
