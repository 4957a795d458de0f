"""Concurrent relays, and publishers that commit out of order, on real connections.

``tests/delivery`` kills and freezes relay processes; ``tests/database/test_relay.py`` simulates that in one process.
"""

import pytest
from django.db import transaction

from idempotency import claim
from idempotency.exceptions import LeaseLostError
from idempotency.models import IdempotencyRecord
from idempotency.outbox import publish
from idempotency.outbox.models import OutboxMessage
from idempotency.outbox.relay import relay_once
from tests.concurrency.racing import Gate, held
from tests.database.publishing import outside, send
from tests.outbox import SENDER, broker
from tests.records import HOUR, from_now

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _empty_broker():
    broker.reset()


@pytest.mark.failure_55
@pytest.mark.postgres
def test_a_lower_id_that_commits_after_a_higher_one_was_sent_is_sent():
    gate = Gate()

    def publish_slowly():
        with transaction.atomic():
            message = publish("orders.placed", "first written", sender=SENDER)
            gate.pass_through()
        return message.pk

    with held(publish_slowly, gate) as slow:
        higher = send(payload="first committed").pk
        assert relay_once().sent == 1
        assert broker.payloads == ["first committed"]
    assert slow.result() < higher
    assert relay_once().sent == 1
    assert broker.payloads == ["first committed", "first written"]


@pytest.mark.postgres
def test_two_attempts_that_publish_concurrently_make_one_message():
    """One attempt is frozen in its transaction. The other took over, and waits for the first one's end."""
    first_gate, second_gate = Gate(), Gate()

    def publish_frozen_inside():
        with claim(outside, account_id="alice", key="k"), transaction.atomic():
            publish("orders.placed", {"id": 1}, sender=SENDER)
            first_gate.pass_through()

    def overtaken():
        with pytest.raises(LeaseLostError):
            publish_frozen_inside()

    def publish_at_last():
        with claim(outside, account_id="alice", key="k"):
            second_gate.pass_through()
            return send(payload={"id": 1}).message_id

    with held(overtaken, first_gate):
        IdempotencyRecord.objects.update(lease_expires_at=from_now(-HOUR))
        with held(publish_at_last, second_gate) as second:
            second_gate.open()
            first_gate.open()
            published = second.result(60)
    assert OutboxMessage.objects.get().message_id == published
    assert relay_once().sent == 1
