"""Operations that publish, and helpers for the tests of ``publish``."""

from django.db import transaction

from idempotency import Operation, claim
from idempotency.lifecycle import Recovery
from idempotency.models import IdempotencyRecord
from idempotency.outbox import publish
from idempotency.outbox.models import OutboxMessage
from tests.concurrency.failures import Killed
from tests.outbox import SENDER
from tests.records import HOUR, from_now

inside = Operation.declare("tests.outbox.inside")
outside = Operation.declare("tests.outbox.outside", transaction=False, recovery=Recovery.REEXECUTE)


def run(operation, block, *, key="k", cut_off=False):
    """One attempt. If it is cut off, its claim is abandoned and the next attempt may take it over at once."""
    try:
        with claim(operation, account_id="alice", key=key) as attempt:
            block()
            assert not attempt.replayed
            if cut_off:
                raise Killed
    except Killed:
        IdempotencyRecord.objects.update(lease_expires_at=from_now(-HOUR))


def send(topic="orders.placed", payload=None, **options):
    """Publish in a separate transaction, as an operation outside one must."""
    with transaction.atomic():
        return publish(topic, payload, **{"sender": SENDER, **options})


def ids():
    return list(OutboxMessage.objects.order_by("pk").values_list("message_id", flat=True))
