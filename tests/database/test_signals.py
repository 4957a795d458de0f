"""Each signal is sent after the change, outside transactions, with the documented arguments."""

import logging

import pytest
from django.db import connection
from django.dispatch import Signal

from idempotency import Completed, NotExecuted, Operation, Reconcile, Unknown, claim, signals
from idempotency.exceptions import InProgressError, KeyReusedError, LeaseLostError, OutcomeUnknownError
from idempotency.identity.fingerprint import Payload
from idempotency.identity.scope import Scope
from idempotency.lifecycle import Status
from idempotency.log import ClaimFilter
from idempotency.models import IdempotencyRecord
from idempotency.operate import resolutions
from idempotency.operate.purge import purge_batches
from idempotency.operate.sweep import recover_batches
from idempotency.operation import registry
from idempotency.outcome import Outcome
from idempotency.protocol.claim import Claim
from idempotency.protocol.claim_request import ClaimRequest
from idempotency.protocol.execution import release_or_park, running
from idempotency.protocol.waiting import acquire_or_wait
from tests.concurrency.traces import end_lease
from tests.database.claiming import OUTCOME, PAYLOAD, parks, plain
from tests.records import HOUR, make_records

pytestmark = pytest.mark.django_db(transaction=True)

NAMES = {signal: name for name, signal in vars(signals).items() if isinstance(signal, Signal)}

FINDING = []
asks = Operation.declare(
    "tests.signals.reconcile", transaction=False, recovery=Reconcile(lambda record: FINDING[0], max_attempts=2)
)


@pytest.fixture(params=[False, True], ids=["receiver", "failing receiver"])
def received(request):
    """The signals sent, none of them in a transaction. Each test runs again with a receiver that raises an error after
    recording its signal. The result must be the same."""
    received, inside = [], []

    def receive(sender, signal, **arguments):
        if signal in {signals.claimed, signals.taken_over}:
            assert arguments.pop("request_hash")
        received.append((NAMES[signal], sender, arguments))
        if connection.in_atomic_block:
            inside.append(NAMES[signal])
        if request.param:
            raise RuntimeError("a receiver of the project's")

    for signal in NAMES:
        signal.connect(receive)
    yield received
    for signal in NAMES:
        signal.disconnect(receive)
    assert inside == []


def acquire(operation=plain, payload=PAYLOAD):
    return acquire_or_wait(ClaimRequest(operation.policy, Scope("1", operation.name, "k"), payload))


def complete(held):
    with running(Claim(held)):
        held.outcome = OUTCOME


def status():
    return IdempotencyRecord.objects.get().status


def sent(name, operation=plain, attempt=1, **more):
    return name, operation, {"account_id": "1", "idempotency_key": "k", "attempt": attempt, **more}


asked = sent("taken_over", asks, 2)


@pytest.mark.parametrize("operation", [plain, parks], ids=lambda operation: operation.name)
def test_a_run_is_claimed_and_completed_and_its_retry_replayed(received, operation):
    complete(acquire(operation))
    acquire(operation)
    assert received == [sent(name, operation) for name in ("claimed", "completed", "replayed")]
    assert status() == Status.COMPLETED


def test_a_duplicate_of_a_live_claim_is_a_conflict(received):
    acquire()
    with pytest.raises(InProgressError):
        acquire()
    assert received == [sent("claimed"), sent("conflicted", attempt=0)]


def test_another_payload_is_a_reused_key(received):
    complete(acquire())
    with pytest.raises(KeyReusedError):
        acquire(payload=Payload({"amount": 2}))
    assert received[2:] == [sent("key_reused")]


@pytest.mark.parametrize(
    ("operation", "name", "left"), [(plain, "released", Status.RECOVERABLE), (parks, "parked", Status.PARKED)]
)
def test_a_run_that_failed_is_released_or_parked(received, operation, name, left):
    with pytest.raises(ZeroDivisionError), running(Claim(acquire(operation))):
        _ = 1 / 0
    assert received[1:] == [sent(name, operation)]
    assert status() == left


def test_a_run_without_an_outcome_is_released(received):
    with running(Claim(acquire())):
        pass
    assert received[1:] == [sent("released")]
    assert status() == Status.RECOVERABLE


def test_an_attempt_that_declined_and_then_failed_is_a_failure(received):
    held = acquire()
    held.declined = True
    release_or_park(held, "OperationalError: the connection is gone")
    acquire()
    assert received[1:] == [sent("released"), sent("claimed", attempt=2)]


def test_a_take_over_and_the_owners_lost_lease_are_announced(received):
    owner = acquire()
    end_lease()
    winner = acquire()
    with pytest.raises(LeaseLostError):
        complete(owner)
    complete(winner)
    assert received[1:] == [sent("taken_over", attempt=2), sent("lease_lost"), sent("completed", attempt=2)]


def test_a_lease_that_an_inner_claim_lost_is_announced_once(received):
    owner = acquire()
    end_lease()
    acquire()
    with pytest.raises(LeaseLostError), running(Claim(acquire(parks))):
        complete(owner)
    assert received[2:] == [sent("claimed", parks), sent("lease_lost"), sent("parked", parks)]


def test_a_record_past_retention_is_claimed_as_a_new_one(received):
    make_records(1, operation=plain.name, idempotency_key="k", request_hash="v1:0")
    acquire()
    assert received == [sent("claimed", attempt=2)]


def test_a_claim_that_may_not_run_again_is_parked_by_the_retry(received):
    acquire(parks)
    end_lease()
    with pytest.raises(OutcomeUnknownError):
        acquire(parks)
    assert received[1:] == [sent("parked", parks)]
    assert status() == Status.PARKED


@pytest.mark.parametrize(
    ("operation", "finding", "expected"),
    [
        (plain, None, [sent("recovered", plain, status="recoverable")]),
        (parks, None, [sent("parked", parks), sent("recovered", parks, status="parked")]),
        (asks, Completed({}), [asked, sent("recovered", asks, 2, status="completed")]),
        (asks, NotExecuted(), [asked, sent("recovered", asks, 2, status="recoverable")]),
        (asks, Unknown(), [asked, sent("parked", asks, 2), sent("recovered", asks, 2, status="parked")]),
    ],
    ids=["reexecute", "park", "completed", "not executed", "unknown"],
)
def test_the_sweep_announces_the_result_of_each_claim(received, operation, finding, expected):
    FINDING[:] = [finding]
    acquire(operation)
    end_lease()
    next(recover_batches())
    assert received[1:] == expected
    assert status() == expected[-1][2]["status"]


def test_a_retry_that_finds_the_outcome_announces_the_same(received):
    FINDING[:] = [Completed({})]
    acquire(asks)
    end_lease()
    assert isinstance(acquire(asks), Outcome)
    assert received[1:] == [asked, sent("recovered", asks, 2, status="completed")]


def test_an_operator_settles_a_record(received):
    make_records(1, Status.PARKED, expires=HOUR, operation=parks.name, idempotency_key="k")
    resolutions.mark_not_executed(IdempotencyRecord.objects.get(), by="ops")
    IdempotencyRecord.objects.update(status=Status.PARKED)
    resolutions.record_outcome(IdempotencyRecord.objects.get(), {}, by="ops")
    IdempotencyRecord.objects.update(status=Status.PARKED, operation="tests.signals.unknown")
    resolutions.release(IdempotencyRecord.objects.get(), by="ops")
    assert registry.get("tests.signals.unknown") is None
    assert received == [
        sent("recovered", parks, status="recoverable"),
        sent("recovered", parks, status="completed"),
        sent("recovered", None, status="recoverable"),
    ]


def test_a_purged_batch_is_counted(received):
    make_records(3)
    next(purge_batches())
    next(purge_batches())
    assert received == [("purged", IdempotencyRecord, {"count": 3})]
    assert not IdempotencyRecord.objects.exists()


# The logging filter: each line names its operation


def named():
    record = logging.makeLogRecord({})
    assert ClaimFilter().filter(record) is True
    fields = vars(record)
    return fields["idempotency_operation"], fields["idempotency_trace"], fields["idempotency_attempt"]


def test_a_log_line_names_its_operation_trace_and_attempt():
    with claim("tests.log", account_id="7", key=f"{'0' * 32}.{'1' * 36}") as run:
        run.result = named()
    assert run.result == ["tests.log", "0" * 32, 1]  # as JSON
