"""Messages of one ordering key are sent in their order, whatever happens to one of them."""

from __future__ import annotations

from typing import Any

import pytest

from idempotency.models import MessageStatus, OutboxMessage
from idempotency.outbox.backlog import requeue
from idempotency.outbox.relay import MAX_ATTEMPTS, RelayResult, relay_batches, relay_once
from idempotency.protocol import faults
from tests.database.relay.trouble import BROKEN, UNREACHABLE, kill, message, relay_killed
from tests.outbox import OTHER_SENDER, SENDER, broker, make_due, make_messages, other_broker, statuses
from tests.records import HOUR, MINUTE

pytestmark = pytest.mark.django_db(transaction=True)


def payloads_of(key: str) -> list[Any]:
    """What was sent of an order, in the order in which it was."""
    of_key = {one.message_id for one in OutboxMessage.objects.filter(ordering_key=key)}
    return [payload for message_id, _, payload in broker.deliveries if message_id in of_key]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_order_is_kept_within_a_key_whatever_the_batches(batch_size: int) -> None:
    for number in range(5):
        for key in ("a", "b", ""):
            make_messages(ordering_key=key, payload=str(number))
    list(relay_batches(batch_size=batch_size))
    assert payloads_of("a") == payloads_of("b") == [0, 1, 2, 3, 4]
    assert len(broker.deliveries) == 15


def test_a_whole_order_is_sent_in_one_batch_also_after_a_relay_was_killed() -> None:
    make_messages(50, ordering_key="a")
    faults.armed["relay.published"] = kill
    relay_killed()
    faults.armed.clear()
    make_due()
    assert relay_once() == RelayResult(sent=50)
    assert broker.payloads == [0, *range(50)]


@pytest.mark.parametrize(
    "held_up", [{"due": HOUR}, {"lease": MINUTE, "attempts": 1}], ids=["not due", "another relay is sending it"]
)
def test_one_that_can_not_be_sent_now_holds_up_those_behind_it(held_up: dict[str, Any]) -> None:
    """Another relay may have the second of an order: an earlier one was committed after it took that."""
    make_messages(ordering_key="a", payload="1")
    make_messages(ordering_key="a", payload="2", **held_up)
    make_messages(ordering_key="a", payload="3")
    assert [batch.sent for batch in relay_batches()] == [1]
    make_due()
    assert [batch.sent for batch in relay_batches()] == [2]
    assert broker.payloads == [1, 2, 3]


def test_what_is_behind_a_message_of_another_sender_waits_for_its_own() -> None:
    make_messages(1, ordering_key="a", sender=OTHER_SENDER)
    make_messages(1, ordering_key="a")
    assert relay_once(skip={SENDER}) == RelayResult(sent=1)
    assert statuses() == [("sent", 1), ("pending", 0)]


@pytest.mark.parametrize("error", [BROKEN, UNREACHABLE])
def test_order_is_kept_across_failures(error: Exception) -> None:
    make_messages(4, ordering_key="a")
    make_messages(1, payload='"b"', ordering_key="b", sender=OTHER_SENDER)
    broker.refuse(1, error=error)
    relay_once()
    assert broker.payloads == [0]
    assert other_broker.payloads == ["b"]
    assert relay_once().touched == 0, "what is behind it waits for it, and it for its time"
    make_due()
    relay_once()
    assert broker.payloads == [0]
    broker.reset()
    make_due()
    assert relay_once().sent == 3
    assert broker.payloads == [1, 2, 3]
    counted = [attempts for _, attempts in statuses()]
    assert counted == ([1, 3, 1, 1, 1] if error is BROKEN else [1] * 5), "who waits is not tried"


def test_a_dead_message_holds_up_those_behind_it_until_it_is_requeued() -> None:
    (dead,) = make_messages(1, MessageStatus.DEAD, ordering_key="a", attempts=MAX_ATTEMPTS)
    make_messages(2, ordering_key="a", payload='"behind"')
    make_messages(1, payload='"elsewhere"')
    assert relay_once().sent == 1
    assert broker.payloads == ["elsewhere"]
    requeue(message(dead), by="a test")
    assert relay_once().sent == 3
    assert broker.payloads == ["elsewhere", 0, "behind", "behind"]
