"""Messages that can't be sent, the reports of a relay, and ``manage.py relay_outbox``."""

from datetime import timedelta
from functools import partial
from unittest.mock import Mock

import pytest

from idempotency import signals
from idempotency.exceptions import BrokerUnavailableError, ReceiverBusyError
from idempotency.outbox import relay
from idempotency.outbox.models import MessageStatus, OutboxMessage
from idempotency.outbox.relay import MAX_ATTEMPTS, Destination, RelayResult, relay_batches, relay_once
from idempotency.outbox.upkeep import requeue
from tests.commands import run_command
from tests.operations import receiving
from tests.outbox import (
    ALL_UNREACHABLE,
    OTHER_SENDER,
    SENDER,
    UNREACHABLE,
    broker,
    make_due,
    make_messages,
    other_broker,
    statuses,
)
from tests.records import HOUR, MINUTE, database_now

pytestmark = pytest.mark.django_db(transaction=True)

#: The destination of messages by default.
PLACE = Destination(SENDER, "orders.placed")


def message(pk):
    return OutboxMessage.objects.get(pk=pk)


def is_postponed(pk, seconds, *, since):
    """Whether the next try is due this many seconds after a moment between ``since`` and now."""
    return since <= message(pk).next_try_at - timedelta(seconds=seconds) <= database_now()


def test_a_refused_message_is_retried_with_growing_pauses_until_dead():
    (pk,) = make_messages()
    broker.refuse(0, error=ValueError("no such queue"))
    for attempt in range(1, MAX_ATTEMPTS):
        began = database_now()
        assert relay_once() == RelayResult(postponed=1)
        assert is_postponed(pk, min(2**attempt, 3600), since=began)
        assert message(pk).lease_expires_at is None
        make_due()
    assert message(pk).error == "ValueError: no such queue"
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


def test_an_unreachable_broker_uses_up_no_attempt():
    first, second = make_messages(2)
    broker.refuse(0, 1, error=UNREACHABLE)
    for _ in range(MAX_ATTEMPTS + 1):
        began = database_now()
        result = relay_once()
        assert result == RelayResult(put_back=2, paused={PLACE: "BrokerUnavailableError: no route"})
        assert statuses() == [("pending", 0)] * 2
        assert all(is_postponed(pk, 5, since=began) for pk in (first, second))
        make_due()
    assert message(first).error == "BrokerUnavailableError: no route"
    broker.reset()
    assert relay_once() == RelayResult(sent=2)
    assert statuses() == [("sent", 1)] * 2


def test_an_unreachable_broker_is_tried_once_per_run_and_blocks_no_other():
    broker.answer = sending = Mock(side_effect=UNREACHABLE)
    make_messages(3, due=-HOUR)
    make_messages(3, due=-HOUR, sender=OTHER_SENDER)
    make_messages(3, due=-HOUR)
    results = list(relay_batches(batch_size=2))
    assert [call.args[0].payload for call in sending.call_args_list] == ["0"]
    assert other_broker.payloads == [0, 1, 2]
    total = sum(results, RelayResult())
    assert (total.sent, total.put_back, total.exhausted) == (3, 2, True)
    assert total.paused.keys() == {PLACE}


def topics_sent():
    return [topic for _, topic, _ in broker.deliveries]


def make_messages_for(topics, count=1):
    return [make_messages(count, topic=topic, due=-HOUR) for topic in topics]


@pytest.mark.failure_114
@pytest.mark.parametrize("error", [UNREACHABLE, ReceiverBusyError("503")], ids=["unreachable", "busy"])
def test_one_failing_receiver_keeps_no_other_waiting(error):
    """Although its messages are the first that are due, and fill more than a batch."""
    broker.refuse(*range(5), error=error)
    ill, *_ = make_messages_for(["a", *"bcd"], 5)
    OutboxMessage.objects.exclude(pk__in=ill).update(payload='"healthy"')
    total = sum(relay_batches(batch_size=2), RelayResult())
    assert topics_sent() == [topic for topic in "bcd" for _ in range(5)]
    assert (total.sent, total.exhausted, total.paused.keys()) == (15, True, {Destination(SENDER, "a")})
    assert total.put_back + total.postponed == 2  # the other three were left


def test_a_sender_may_say_that_none_of_its_topics_can_be_reached():
    broker.answer = sending = Mock(side_effect=ALL_UNREACHABLE)
    make_messages_for("abc")
    make_messages(1, sender=OTHER_SENDER)
    total = sum(relay_batches(batch_size=1), RelayResult())
    assert len(sending.call_args_list) == 1
    assert other_broker.payloads == [0]
    assert total.paused == {Destination(SENDER): "BrokerUnavailableError: no route"}
    assert total.as_dict()["paused"] == {f"Sender {SENDER}": "BrokerUnavailableError: no route"}
    assert run() == (
        5,
        ["Sent 0 messages, 2 not tried."],
        [f"Sender {SENDER} can't be reached: {total.paused[(SENDER, None)]}"],
    )


@pytest.mark.failure_114
@pytest.mark.parametrize(
    ("asked", "waited"),
    [(600, 600), ("600", 600), (1, 2), (0, 2), (-5, 2), (float("nan"), 2), (10**9, 3600), (float("inf"), 3600)],
)
def test_a_busy_receiver_is_tried_again_when_it_asks_for_it(asked, waited):
    broker.answer = Mock(side_effect=ReceiverBusyError("429", retry_after=asked))
    tried, waiting = make_messages(2)
    began = database_now()
    assert relay_once() == RelayResult(postponed=1, put_back=1, paused={PLACE: "ReceiverBusyError: 429"})
    assert statuses() == [("pending", 1), ("pending", 0)]  # only the try counts
    assert is_postponed(tried, waited, since=began)
    assert is_postponed(waiting, waited, since=began)


def test_a_busy_receivers_message_is_dead_at_last():
    make_messages(1, attempts=MAX_ATTEMPTS - 1)
    broker.answer = Mock(side_effect=ReceiverBusyError("503", retry_after=60))
    assert relay_once().dead == 1


def test_more_failing_receivers_than_fit_into_a_statement_end_the_run(monkeypatch):
    """Their messages are due again at once, but are tried only once."""
    monkeypatch.setattr(relay, "MAX_PAUSED", 2)
    monkeypatch.setattr(relay, "UNAVAILABLE_BACKOFF", timedelta(0))
    broker.refuse(0, error=UNREACHABLE)
    *_, (healthy,) = make_messages_for([*"abcdef", "healthy"])
    OutboxMessage.objects.filter(pk=healthy).update(payload='"healthy"')
    total = sum(relay_batches(batch_size=2), RelayResult())
    assert (total.sent, len(total.paused), total.exhausted) == (1, 6, True)
    assert statuses() == [("pending", 0)] * 6 + [("sent", 1)]


def test_a_signal_reports_how_many_were_sent():
    make_messages(3)
    broker.refuse(1, error=ConnectionError())
    with receiving(signals.relayed) as received:
        relay_once()
    (sent,) = received
    assert (sent["sender"], sent["count"]) == (OutboxMessage, 2)


@pytest.mark.parametrize("lease", [None, -MINUTE])
def test_a_signal_reports_a_dead_message(lease, caplog):
    attempts = MAX_ATTEMPTS - 1 if lease is None else MAX_ATTEMPTS
    (pk,) = make_messages(attempts=attempts, lease=lease, account_id="alice", payload='"secret"')
    broker.refuse("secret", error=ConnectionError("secret"))
    with receiving(signals.message_dead) as received:
        assert relay_once().dead == 1
    dead = message(pk)
    (sent,) = received
    of_it = {"message_id": dead.message_id, "account_id": "alice", "idempotency_key": dead.idempotency_key}
    assert sent == {**sent, "sender": OutboxMessage, **of_it, "topic": "orders.placed", "attempt": MAX_ATTEMPTS}
    assert f"Message {dead.message_id} on orders.placed is dead" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.failure_83
@pytest.mark.parametrize("kind", [ValueError, BrokerUnavailableError])
def test_the_log_names_where_a_sender_failed_without_quoting_its_error(kind, caplog):
    (pk,) = make_messages(payload='"4242"')

    def refuse(message):
        try:
            raise RuntimeError(f"card {message.payload}")
        except RuntimeError as error:
            raise kind(f"declined: {message.payload}") from error

    broker.answer = refuse
    relay_once()
    (record,) = [record for record in caplog.records if record.name == "idempotency"]
    assert "4242" not in caplog.text
    assert record.exc_info is None
    assert f"{kind.__name__}\n" in record.getMessage()
    assert "in refuse" in record.getMessage()
    assert "declined" in message(pk).error


run = partial(run_command, "relay_outbox")


def test_relay_outbox_sends_due_messages_and_reports_them():
    make_messages(600)
    assert run() == (0, ["Sent 600 messages."], [])
    assert len(broker.deliveries) == 600  # more than one batch
    assert run() == (0, ["Sent 0 messages."], [])


def test_relay_outbox_reports_unsent_messages():
    make_messages(3)
    make_messages(1, payload='"dies"', attempts=15)
    make_messages(1, payload='"refused"')
    broker.refuse("dies", "refused", error=ValueError("no such queue"))
    assert run() == (0, ["Sent 3 messages, 1 postponed, 1 dead."], [])


def test_an_unreachable_broker_has_a_separate_exit_code():
    make_messages(2)
    make_messages(1, sender=OTHER_SENDER)
    broker.refuse(0, 1, error=UNREACHABLE)
    complaint = f"Sender {SENDER}, topic orders.placed can't be reached: BrokerUnavailableError: no route"
    assert run() == (5, ["Sent 1 message, 2 not tried."], [complaint])
    make_due()
    assert run(verbosity=0) == (5, [], [complaint])


def test_a_dry_run_counts_and_sends_nothing():
    assert run(dry_run=True) == (0, ["0 messages pending, 0 ready to send.", "0 messages dead."], [])
    make_messages(2, due=-HOUR)
    make_messages(3, due=HOUR)
    make_messages(1, MessageStatus.DEAD)
    code, (pending, due, dead), errors = run(dry_run=True)
    assert (code, pending, errors) == (0, "5 messages pending, 2 ready to send.", [])
    assert (due[:31], dead) == ("The oldest has been due for 3,6", "1 message dead.")
    assert broker.deliveries == []
