"""What becomes of a message that could not be sent: tried again later and later, put back, or dead."""

from __future__ import annotations

import logging

import pytest
from django.utils import timezone

from idempotency.models import OutboxMessage
from idempotency.outbox import relay
from idempotency.outbox.backlog import requeue
from idempotency.outbox.relay import MAX_ATTEMPTS, RelayResult, relay_batches, relay_once
from tests.database.relay.trouble import BROKEN, UNREACHABLE, message
from tests.outbox import OTHER_SENDER, broker, make_due, make_messages, other_broker, statuses
from tests.records import HOUR

pytestmark = pytest.mark.django_db(transaction=True)


def seconds_until_next_try(pk: int) -> float:
    left = message(pk).next_try_at - timezone.now()
    return left.total_seconds()


def test_a_message_that_is_refused_is_tried_again_later_and_later() -> None:
    (pk,) = make_messages()
    broker.refuse(0, error=ValueError("no such queue"))
    waits = []
    for _ in range(MAX_ATTEMPTS - 1):
        assert relay_once() == RelayResult(postponed=1)
        waits.append(round(seconds_until_next_try(pk)))
        assert message(pk).lease_expires_at is None
        make_due()
    assert message(pk).error == "ValueError: no such queue"
    expected = [min(2**attempt, 3600) for attempt in range(1, MAX_ATTEMPTS)]
    assert all(abs(wait - due) <= 2 for wait, due in zip(waits, expected, strict=True)), waits
    assert statuses() == [("pending", MAX_ATTEMPTS - 1)]
    assert relay_once() == RelayResult(dead=1)
    assert statuses() == [("dead", MAX_ATTEMPTS)]
    make_due()
    assert relay_once() == RelayResult()
    broker.reset()
    requeue(message(pk), by="a test")
    assert relay_once() == RelayResult(sent=1)
    assert statuses() == [("sent", 1)]
    assert message(pk).error == ""


def test_a_message_that_is_refused_holds_up_no_other() -> None:
    make_messages(5)
    broker.refuse(1, 3, error=BROKEN)
    assert relay_once() == RelayResult(sent=3, postponed=2)
    assert broker.payloads == [0, 2, 4]


def test_a_sender_that_is_not_there_any_more_is_a_refusal() -> None:
    (pk,) = make_messages(sender="tests.outbox.removed")
    assert relay_once().postponed == 1
    assert "removed" in message(pk).error


def test_an_error_is_kept_as_far_as_a_database_can(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "idempotency")  # what the log captured could not be reported by a test process
    (pk,) = make_messages()
    broker.refuse(0, error=ValueError("a\0b\ud800c" + "d" * 5_000))
    assert relay_once().postponed == 1
    assert message(pk).error.startswith("ValueError: a\ufffdb?c")
    assert len(message(pk).error) == relay.MAX_ERROR


def test_a_broker_that_can_not_be_reached_is_nobodys_fault() -> None:
    first, second = make_messages(2)
    broker.refuse(0, 1, error=UNREACHABLE)
    for _ in range(MAX_ATTEMPTS + 1):
        result = relay_once()
        assert result == RelayResult(
            put_back=2, unavailable={"tests.outbox.broker": "BrokerUnavailableError: no route"}
        )
        assert statuses() == [("pending", 0)] * 2
        assert all(3 < seconds_until_next_try(pk) <= 6 for pk in (first, second))
        make_due()
    assert message(first).error == "BrokerUnavailableError: no route"
    broker.reset()
    assert relay_once() == RelayResult(sent=2)
    assert statuses() == [("sent", 1)] * 2


def test_a_broker_that_can_not_be_reached_is_asked_once_a_run_and_holds_up_no_other() -> None:
    asked: list[str] = []

    def answer(message: OutboxMessage) -> None:
        asked.append(message.payload)
        raise UNREACHABLE

    broker.answer = answer
    make_messages(3, due=-HOUR)
    make_messages(3, due=-HOUR, sender=OTHER_SENDER)
    make_messages(3, due=-HOUR)
    results = list(relay_batches(batch_size=2))
    assert asked == ["0"]
    assert other_broker.payloads == [0, 1, 2]
    total = sum(results, RelayResult())
    assert (total.sent, total.put_back, total.exhausted) == (3, 2, True)
    assert total.unavailable.keys() == {"tests.outbox.broker"}
