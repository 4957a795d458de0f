"""``publish``: a message exists if and only if its transaction committed, and only once per operation."""

import functools
import itertools
import logging
from datetime import timedelta
from unittest.mock import Mock
from uuid import uuid4

import pytest
from django.db import IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext

from idempotency import claim, require_claim
from idempotency.exceptions import LeaseLostError, MessageReusedError, NoTransactionError
from idempotency.models import IdempotencyRecord
from idempotency.outbox import publish, publishing
from idempotency.outbox.models import MessageStatus, OutboxMessage
from idempotency.outbox.relay import relay_once
from tests.concurrency.racing import Gate, held
from tests.database.publishing import ids, inside, outside, run, send
from tests.outbox import OTHER_SENDER, PLAIN_SENDER, SENDER, broker, other_broker
from tests.records import HOUR, from_now

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_message_exists_once_its_transaction_has_committed():
    message = send(payload={"id": 1}, headers={"tenant": "a"})
    assert OutboxMessage.objects.values().get() == {
        **{name: getattr(message, name) for name in ("id", "message_id", "created_at", "next_try_at")},
        "topic": "orders.placed",
        "payload": '{"id": 1}',
        "headers": {"tenant": "a"},
        "account_id": "",
        "idempotency_key": str(message.message_id),
        "sender": SENDER,
        "status": MessageStatus.PENDING,
        "attempts": 0,
        "lease_expires_at": None,
        "sent_at": None,
        "error": "",
    }
    assert relay_once().sent == 1
    assert broker.deliveries == [(message.message_id, "orders.placed", {"id": 1})]


@pytest.mark.failure_54
def test_a_rolled_back_transaction_publishes_nothing():
    def undo():
        with transaction.atomic():
            publish("orders.placed", "undone", sender=SENDER)
            transaction.set_rollback(True)

    def fail():
        publish("orders.placed", sender=SENDER)
        raise RuntimeError

    undo()
    with transaction.atomic():
        publish("orders.placed", "kept", sender=SENDER)
        undo()  # its savepoint
    with pytest.raises(RuntimeError):
        run(inside, fail)
    relay_once()
    assert broker.payloads == ["kept"]


def be_overtaken():
    IdempotencyRecord.objects.update(attempt=2)


def notice_a_lost_lease():
    require_claim().ownership.lost = True


@pytest.mark.failure_54
@pytest.mark.parametrize("lose", [be_overtaken, notice_a_lost_lease])
def test_an_attempt_that_lost_its_lease_publishes_nothing(lose):
    def block():
        lose()
        publish("orders.placed", sender=SENDER)
        assert lose is be_overtaken, "a lease known to be lost refuses the message"

    with pytest.raises(LeaseLostError):
        run(inside, block)
    assert ids() == []


def test_publishing_outside_a_transaction_is_refused_with_the_remedy():
    with pytest.raises(NoTransactionError, match=r"inside transaction\.atomic\(using='default'\)"):
        publish("orders.placed", sender=SENDER)
    with pytest.raises(NoTransactionError):
        run(outside, lambda: publish("orders.placed", sender=SENDER))
    assert ids() == []


@pytest.mark.django_db(transaction=False)
def test_the_transaction_of_a_test_case_is_not_the_callers():
    with pytest.raises(NoTransactionError):
        publish("orders.placed", sender=SENDER)
    send()
    assert len(ids()) == 1


def test_a_message_costs_one_statement():
    with transaction.atomic(), CaptureQueriesContext(connection) as statements:
        publish("orders.placed", sender=SENDER)
    # Elsewhere an existing message raises an error, so the insert needs a savepoint.
    assert len(statements) == (1 if connection.vendor == "postgresql" else 3)


def test_a_delayed_message_is_kept_back():
    message = send(delay=timedelta(hours=1))
    assert message.next_try_at - message.created_at == timedelta(hours=1)
    assert (relay_once().sent, broker.nudges) == (0, 0)
    OutboxMessage.objects.update(next_try_at=from_now(timedelta(0)))
    assert relay_once().sent == 1


def test_every_database_holds_the_longest_delay():
    longest = timedelta(days=36_500)
    message = send(delay=longest)
    assert message.next_try_at - message.created_at == longest


TOO_DEEP = functools.reduce(lambda inner, _: [inner], range(100_000), [])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"payload": object()}, TypeError, "must be JSON"),
        ({"payload": float("nan")}, TypeError, "must be JSON"),
        ({"payload": {("a", "b"): 1}}, TypeError, "must be JSON"),
        ({"payload": TOO_DEEP}, TypeError, "must be JSON"),
        ({"headers": {"tenant": 1}}, TypeError, "headers must be str"),
        ({"headers": {1: "tenant"}}, TypeError, "headers must be str"),
        ({"headers": {"tenant": "a\0"}}, ValueError, "printable"),
        ({"headers": {"tenant\n": "a"}}, ValueError, "printable"),
        ({"headers": {"idempotency-KEY": "k"}}, ValueError, "because each message has its own key"),
        ({"topic": ""}, ValueError, "topic must be 1 to 255"),
        ({"topic": "t" * 256}, ValueError, "topic must be 1 to 255"),
        ({"topic": "a\0"}, ValueError, "topic must be 1 to 255"),
        ({"topic": 1}, TypeError, "topic must be a str"),
        ({"delay": -timedelta(seconds=1)}, ValueError, "delay must be 0 to 36500 days"),
        ({"delay": timedelta(days=36_501)}, ValueError, "delay must be 0 to 36500 days"),
        ({"delay": timedelta.max}, ValueError, "delay must be 0 to 36500 days"),
        ({"delay": 5}, TypeError, "delay must be a timedelta"),
        ({"sender": "tests.outbox.no_such_sender"}, ImportError, "no_such_sender"),
        ({"sender": "s" * 256}, ValueError, "sender must be 1 to 255"),
    ],
    ids=itertools.count(),
)
def test_an_unsendable_message_is_refused_before_anything_is_written(options, error, message):
    with transaction.atomic(), CaptureQueriesContext(connection) as statements:
        with pytest.raises(error, match=message):
            publish(**{"topic": "orders.placed", "sender": SENDER, **options})
        assert not statements.captured_queries


def test_a_message_under_a_claim_derives_its_identity_from_it():
    with claim(inside, account_id="alice", key="k"):
        message = publish("orders.placed", sender=SENDER)
        scope = require_claim().scope
    assert (message.account_id, message.message_id.version) == ("alice", 8)
    assert message.idempotency_key == scope.key_for(message.message_id) == f"{scope.trace}.{message.message_id}"


def test_a_message_published_before_is_returned_in_any_state():
    returned = []
    run(outside, lambda: returned.append(send(payload={"a": 1, "b": [2, None]})), cut_off=True)
    relay_once()
    run(outside, lambda: returned.append(send(payload={"b": [2, None], "a": 1})))
    before, after = returned
    assert (after.pk, after.message_id, after.status) == (before.pk, before.message_id, MessageStatus.SENT)
    assert relay_once().sent == 0


def test_named_messages_may_be_published_in_another_order():
    def both(*names):
        return lambda: [send(payload=name, name=name) for name in names] and None

    run(outside, both("first", "second"), cut_off=True)
    before = ids()
    run(outside, both("second", "first", "second"))
    assert ids() == before
    assert len({*before}) == 2


def test_similar_topics_and_names_make_separate_messages():
    def block():
        for topic in ("a", "a", "a#2", "a:b", "1:a"):
            send(topic)
        for name in ("b", "b#2"):
            send("a", name=name)

    run(outside, block)
    assert len({*ids()}) == 7


def test_each_operation_and_account_publishes_separate_messages():
    run(outside, send)
    run(outside, send, key="other")
    run(inside, send)
    assert len({*ids()}) == 3


def test_a_skipped_step_does_not_shift_later_messages():
    def block():
        require_claim().step("pack", lambda: send(payload="in the step") and None)
        send(payload="after it")

    run(outside, block, cut_off=True)
    run(outside, block)
    relay_once()
    assert broker.payloads == ["in the step", "after it"]


@pytest.mark.parametrize("payload", [{"id": 2}, {"id": 1.0}, {"id": True}, None])
def test_a_different_message_in_the_same_place_is_refused(payload):
    def other():
        with transaction.atomic():
            with pytest.raises(MessageReusedError, match="name="):
                publish("orders.placed", payload, sender=SENDER)
            publish("orders.placed", "next", sender=SENDER)

    run(outside, lambda: send(payload={"id": 1}), cut_off=True)
    run(outside, other)
    assert [message.payload for message in OutboxMessage.objects.order_by("pk")] == ['{"id": 1}', '"next"']


def test_the_sender_is_nudged_once_per_transaction_after_its_commit():
    def look():
        assert not connection.in_atomic_block
        assert OutboxMessage.objects.count() == 3

    broker.on_nudge = look
    with transaction.atomic():
        publish("a", sender=SENDER)
        with transaction.atomic():
            publish("b", sender=SENDER)
        with transaction.atomic():
            publish("undone", sender=SENDER)
            transaction.set_rollback(True)
        publish("c", sender=OTHER_SENDER)
        assert (broker.nudges, other_broker.nudges) == (0, 0)
    assert (broker.nudges, other_broker.nudges) == (1, 1)
    broker.on_nudge = lambda: None
    send()
    assert (broker.nudges, other_broker.nudges) == (2, 1)


def test_a_nudge_that_fails_changes_nothing(caplog):
    broker.on_nudge = Mock(side_effect=ConnectionError("the broker is down"))
    run(inside, lambda: publish("a", sender=SENDER))
    assert broker.nudges == 1
    assert "the broker is down" in caplog.text
    assert caplog.records[-1].levelno == logging.ERROR
    assert IdempotencyRecord.objects.get().status == "completed"
    assert relay_once().sent == 1


def test_a_message_published_by_a_nudge_is_nudged_for():
    """Celery does this if its tasks are eager."""

    def relay():
        broker.on_nudge = lambda: None
        relay_once()
        send(payload="more")

    broker.on_nudge = relay
    with transaction.atomic():
        publish("a", 1, sender=SENDER)
        publish("a", 2, sender=SENDER)
    assert broker.nudges == 2
    assert broker.payloads == [1, 2]


def test_a_sender_without_a_nudge_still_sends():
    send(sender=PLAIN_SENDER)
    assert relay_once().sent == 1
    assert len(broker.deliveries) == 1


def test_a_message_refused_by_the_database_does_not_count_as_existing():
    message = OutboxMessage(message_id=uuid4(), idempotency_key="k", topic=None, sender=SENDER, payload="1")
    with pytest.raises(IntegrityError), transaction.atomic():
        publishing._save("default", message, timedelta(0))


# Publishers on concurrent connections


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
