"""Claims as the functions of the protocol take them, with no handler around them."""

from datetime import timedelta

from idempotency import PARK, REEXECUTE, Completed, Operation, Reconcile
from idempotency.identity.fingerprint import Payload
from idempotency.identity.scope import Scope
from idempotency.outcome import Outcome
from idempotency.protocol import acquisition
from idempotency.protocol.acquisition import ClaimRequest

PAYLOAD = Payload({"amount": 1})
OUTCOME = Outcome(201, (), "{}")

TTL = timedelta(days=2)
plain = Operation("tests.plain", ttl=TTL)
again = Operation("tests.again", ttl=TTL, transaction=False, recovery=REEXECUTE)
parks = Operation("tests.parks", ttl=TTL, transaction=False, recovery=PARK)
#: What the reconciler finds for a key, if it is not the outcome of a run.
FINDINGS = {}
asks = Operation(
    "tests.asks",
    ttl=TTL,
    transaction=False,
    recovery=Reconcile(lambda record: FINDINGS.get(record.idempotency_key, Completed({"found": True}))),
)


def acquire(operation, key="k", payload=PAYLOAD):
    """The claim that account 1 is given for its key, or the recorded outcome."""
    request = ClaimRequest(operation.policy, Scope("1", operation.name, key), payload)
    return acquisition.acquire(request, expect_record=False)
