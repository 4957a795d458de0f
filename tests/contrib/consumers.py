"""Tasks that tests deliver messages to. Each effect is one row."""

from collections import Counter
from datetime import timedelta
from typing import Any

from celery import shared_task

from idempotency import PARK, REEXECUTE, require_claim
from idempotency.contrib.celery import idempotent_task
from idempotency.contrib.celery.policy import policy_of
from idempotency.identity.fingerprint import Payload
from idempotency.identity.scope import Scope
from idempotency.models import IdempotencyRecord
from idempotency.protocol.acquisition import acquire
from idempotency.protocol.claim_request import ClaimRequest
from testproject.models import Receipt
from tests.contrib.deliveries import DEAD, acts
from tests.records import HOUR, from_now

LATE = {"acks_late": True, "reject_on_worker_lost": True}


def effect(label, amount=1):
    return Receipt.objects.create(label=label, amount=amount).pk


@shared_task(name="tests.send", **LATE)
@idempotent_task("tests.send", dead_letter=DEAD)
def send(label: str, amount: int = 1, **more: Any) -> dict[str, Any]:
    return {"receipt": effect(label, amount), "pair": (1, 2)}


@shared_task(name="tests.act", bind=True, max_retries=2, default_retry_delay=0, **LATE)
@idempotent_task("tests.act", dead_letter=DEAD, max_attempts=2)
def act(self: Any, label: str) -> Any:
    effect(label)
    return acts[label](self)


def acting_task(name, celery=None, **policy):
    @shared_task(name=name, **LATE, **(celery or {}))
    @idempotent_task(name, **policy)
    def run(label: str) -> Any:
        effect(label)
        return acts[label](None)

    return run


RETRIED = {"autoretry_for": (Exception,)}  # by Celery, for any error
auto = acting_task("tests.auto", RETRIED | {"retry_backoff": False, "max_retries": 2}, dead_letter=DEAD, max_attempts=1)
#: Without dead letters, in another scope.
bare = acting_task("tests.bare", RETRIED, consumer="mailer", max_attempts=2)
parked = acting_task("tests.parked", dead_letter=DEAD, transaction=False, recovery=PARK)
LONG = {"lease": timedelta(hours=1), "heartbeat": None}
outside = acting_task("tests.outside", dead_letter=DEAD, transaction=False, recovery=REEXECUTE, **LONG)


@shared_task(name="tests.hop", **LATE)
@idempotent_task("tests.hop")
def hop(left: int) -> str:
    """Publish itself again, ``left`` times."""
    effect(f"hop {left}")
    if left:
        hop.delay(left - 1)
    return require_claim().trace


@shared_task(name="tests.plain")
def plain(*args: Any) -> Any:
    return acts[args[0]](args)


def effects():
    return dict(Counter(Receipt.objects.values_list("label", flat=True)))


def record():
    return IdempotencyRecord.objects.get()


def end_leases():
    IdempotencyRecord.objects.filter(status="in_progress").update(lease_expires_at=from_now(-HOUR))


def hold(task, message_id, **arguments):
    """Claim a message as another worker that is still running it."""
    operation = policy_of(task).operation
    request = ClaimRequest(operation.policy, Scope("celery", operation.name, message_id), Payload(arguments))
    acquire(request, expect_record=False)
