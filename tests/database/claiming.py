"""Claims as the functions of the protocol take them, with no handler around them."""

from idempotency.identity.fingerprint import Payload
from idempotency.identity.scope import Scope
from idempotency.outcome import Outcome
from idempotency.protocol import acquisition
from idempotency.protocol.acquisition import ClaimRequest

PAYLOAD = Payload({"amount": 1})
OUTCOME = Outcome(201, (), "{}")


def acquire(operation, key="k", payload=PAYLOAD):
    """The claim that account 1 is given for its key, or the recorded outcome."""
    return acquisition.acquire(ClaimRequest(operation.policy, Scope("1", operation.name, key), payload))
