"""Claims made by calling the protocol's functions directly, without a handler."""

from datetime import timedelta

from idempotency import PARK, REEXECUTE, Completed, Operation, Reconcile
from idempotency.identity.fingerprint import Payload
from idempotency.identity.scope import Scope
from idempotency.outcome import Outcome
from idempotency.protocol import acquisition
from idempotency.protocol.claim_request import ClaimRequest
from idempotency.store import store_for

PAYLOAD = Payload({"amount": 1})
OUTCOME = Outcome(201, (), "{}")

RETENTION = timedelta(days=2)
plain = Operation.declare("tests.plain", retention=RETENTION)
again = Operation.declare("tests.again", retention=RETENTION, transaction=False, recovery=REEXECUTE)
parks = Operation.declare("tests.parks", retention=RETENTION, transaction=False, recovery=PARK)
#: The reconciler's findings by key. For any other key it finds a completed operation.
FINDINGS = {}
asks = Operation.declare(
    "tests.asks",
    retention=RETENTION,
    transaction=False,
    recovery=Reconcile(lambda record: FINDINGS.get(record.idempotency_key, Completed({"found": True}))),
)


def acquire(operation, key="k", payload=PAYLOAD):
    """Acquire account 1's key. Returns its claim or the recorded outcome."""
    request = ClaimRequest(operation.policy, Scope("1", operation.name, key), payload)
    return acquisition.acquire(request, expect_record=False)


def send_every_statement(scope):
    """Claim a scope and change its record until it is parked. Every further change must be refused."""
    store, lease, retention = store_for("default"), timedelta(seconds=-1), timedelta(hours=1)

    def fence():
        return store.read(scope).fence

    assert store.insert_claim(scope, "v1:1", lease=lease, retention=retention, undone_by_crash=True)
    assert store.take_over(fence(), lease=lease, retention=retention, undone_by_crash=True)
    assert store.set_lease(fence(), lease, retention=retention)
    assert store.park_abandoned(fence())
    assert not store.release(fence())
    assert not store.park(fence())
    assert not store.complete(fence(), OUTCOME, retention=retention)
    assert not store.start_over(fence(), "v1:2", lease=lease, retention=retention, undone_by_crash=True)
