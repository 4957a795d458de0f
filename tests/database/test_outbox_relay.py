"""The relay: what it sends, in which order, how often, and what becomes of what it could not send."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.db.models import F
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from idempotency import faults, relay, signals
from idempotency.exceptions import BrokerUnavailableError
from idempotency.messages import requeue
from idempotency.models import MessageState, OutboxMessage
from idempotency.relay import MAX_ATTEMPTS, RelayResult, relay_batches, relay_once
from tests.outbox import OTHER_SENDER, SENDER, broker, make_due, make_messages, other_broker, states
from tests.records import HOUR, from_now

pytestmark = pytest.mark.django_db(transaction=True)

MINUTE = timedelta(minutes=1)
BROKEN = ConnectionError("no route")
UNREACHABLE = BrokerUnavailableError("no route")


@pytest.fixture(autouse=True)
def _empty_brokers() -> Iterator[None]:
    broker.reset()
    other_broker.reset()
    yield
    faults.armed.clear()


class Killed(BaseException):
    """Stands for the end of the process: nothing handles it."""


def kill() -> None:
    raise Killed


def message(pk: int) -> OutboxMessage:
    return OutboxMessage.objects.get(pk=pk)


def seconds_until_next_try(pk: int) -> float:
    left = message(pk).next_try_at - timezone.now()
    return left.total_seconds()


def relay_killed() -> None:
    with pytest.raises(Killed):
        relay_once()


# What is sent


def test_what_is_due_is_sent_longest_due_first_and_marked() -> None:
    make_messages(due=-MINUTE, payload='"second"')
    make_messages(due=-HOUR, payload='"first"')
    make_messages(due=HOUR, payload='"later"')
    make_messages(state=MessageState.SENT, payload='"sent before"')
    make_messages(state=MessageState.DEAD, payload='"dead"')
    assert relay_once() == RelayResult(sent=2)
    assert broker.payloads == ["first", "second"]
    sent = OutboxMessage.objects.filter(attempts=1)
    assert {(one.state, one.attempts, one.lease_expires_at, one.error) for one in sent} == {("sent", 1, None, "")}
    assert all(abs((one.sent_at - timezone.now()).total_seconds()) < 60 for one in sent if one.sent_at)
    assert relay_once() == RelayResult()


def test_batches_follow_until_nothing_is_due() -> None:
    make_messages(7)
    counts = [batch.sent for batch in relay_batches(batch_size=3)]
    assert counts == [3, 3, 1]
    assert broker.payloads == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("size", [0, 501])
def test_a_batch_has_its_bounds(size: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 500"):
        relay_once(batch_size=size)


def test_the_largest_batch_is_sent() -> None:
    make_messages(500, ordering_key="one order")
    assert relay_once(batch_size=500).sent == 500


def test_it_does_not_run_inside_a_transaction() -> None:
    """What is sent there could neither be leased nor marked before somebody else sends it."""
    make_messages()
    with transaction.atomic(), pytest.raises(RuntimeError, match="durable"):
        relay_once()
    assert broker.deliveries == []


def test_nothing_is_held_while_a_message_is_sent() -> None:
    make_messages()
    broker.answer = lambda message: seen.append(connection.in_atomic_block)
    seen: list[bool] = []
    relay_once()
    assert seen == [False]


def statements_of(count: int, **fields: Any) -> int:
    OutboxMessage.objects.all().delete()
    make_messages(count, **fields)
    with CaptureQueriesContext(connection) as statements:
        relay_once()
    return len(statements)


def test_a_batch_costs_the_same_statements_however_many_it_sends() -> None:
    # BEGIN, the bounds of the transaction where the database has any, take, lease, COMMIT; and the mark.
    expected = 6 if connection.vendor == "postgresql" else 5
    assert statements_of(1) == statements_of(100) == expected
    # In an order: one more, for what comes behind the first ones.
    assert statements_of(2, ordering_key="k") == statements_of(100, ordering_key="k") == expected + 1
    # A batch that fails for one reason is put off by one statement, in place of the mark.
    broker.refuse(*range(100), error=BROKEN)
    assert statements_of(1) == statements_of(100) == expected
    assert statements_of(0) == expected - 2


# A relay that is killed, frozen, or not alone


def test_fm_53_a_relay_killed_between_publishing_and_marking_sends_again_with_the_same_id() -> None:
    make_messages(3)
    faults.armed["relay.published"] = kill
    relay_killed()
    assert broker.payloads == [0]
    faults.armed.clear()
    assert relay_once().sent == 0, "the lease of the dead relay runs"
    make_due()
    assert sum(batch.sent for batch in relay_batches()) == 3
    assert broker.payloads == [0, 0, 1, 2]
    assert broker.ids[0] == broker.ids[1]
    assert states() == [("sent", 2)] * 3


@pytest.mark.parametrize(("place", "sent"), [("relay.claimed", 0), ("relay.marked", 2)])
def test_a_relay_killed_elsewhere_loses_and_doubles_nothing(place: str, sent: int) -> None:
    make_messages(2)
    faults.armed[place] = kill
    relay_killed()
    faults.armed.clear()
    assert len(broker.deliveries) == sent
    make_due()
    assert sum(batch.sent for batch in relay_batches()) == 2 - sent
    assert sorted(broker.payloads) == [0, 1]


def overtake() -> None:
    """The lease is over, and another relay sends what this one has taken."""
    faults.armed.clear()
    make_due()
    assert sum(batch.sent for batch in relay_batches()) == 2


def test_a_frozen_relay_sends_again_and_counts_nothing() -> None:
    make_messages(2)
    faults.armed["relay.claimed"] = overtake
    assert relay_once().sent == 0
    assert broker.ids[:2] == broker.ids[2:]
    assert states() == [("sent", 2)] * 2


@pytest.mark.parametrize("error", [BROKEN, UNREACHABLE])
def test_a_frozen_relay_does_not_undo_what_another_has_sent(error: Exception) -> None:
    make_messages(2)

    def overtake_then_fail() -> None:
        overtake()
        broker.refuse(0, 1, error=error)

    faults.armed["relay.claimed"] = overtake_then_fail
    result = relay_once()
    assert (result.sent, result.postponed, result.put_back) == (0, 0, 0)
    assert states() == [("sent", 2)] * 2


@pytest.mark.parametrize(("error", "attempts"), [(BROKEN, 0), (BROKEN, MAX_ATTEMPTS - 1), (UNREACHABLE, 0)])
def test_a_frozen_relay_does_not_take_a_message_from_who_is_sending_it(error: Exception, attempts: int) -> None:
    (pk,) = make_messages(attempts=attempts)

    def another_takes_it() -> None:
        OutboxMessage.objects.update(attempts=F("attempts") + 1, lease_expires_at=from_now(MINUTE))
        broker.refuse(0, error=error)

    faults.armed["relay.claimed"] = another_takes_it
    assert relay_once().touched == 0
    assert (message(pk).state, message(pk).attempts) == ("pending", attempts + 2)
    assert message(pk).lease_expires_at is not None
    assert relay_once().sent == 0


def test_a_slow_relay_that_gets_its_confirmation_says_so_whoever_has_the_message_by_now() -> None:
    make_messages()
    faults.armed["relay.published"] = lambda: OutboxMessage.objects.update(
        attempts=F("attempts") + 1, lease_expires_at=from_now(MINUTE)
    )
    assert relay_once().sent == 1
    assert states() == [("sent", 2)]


@pytest.mark.parametrize("error", [BROKEN, UNREACHABLE])
def test_a_failure_undoes_no_confirmation_of_the_relay_before(error: Exception) -> None:
    """That one was slow, and got its confirmation while this one had the message."""
    make_messages()
    broker.refuse(0, error=error)
    faults.armed["relay.claimed"] = lambda: OutboxMessage.objects.update(state=MessageState.SENT)
    result = relay_once()
    assert (result.sent, result.postponed, result.put_back) == (0, 0, 0)
    assert states() == [("sent", 1)]


def test_a_relay_that_has_used_half_of_its_lease_puts_the_rest_back(monkeypatch: pytest.MonkeyPatch) -> None:
    make_messages(3)
    clock = [0.0]
    monkeypatch.setattr(relay, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def take_long(message: OutboxMessage) -> None:
        clock[0] += relay.LEASE.total_seconds() / 2

    broker.answer = take_long
    assert relay_once() == RelayResult(sent=1, put_back=2, exhausted=False)
    assert states() == [("sent", 1), ("pending", 0), ("pending", 0)]
    broker.reset()
    assert relay_once() == RelayResult(sent=2)
    assert broker.payloads == [1, 2]


def test_a_message_that_kills_its_relay_ends_up_dead_and_takes_no_other_along() -> None:
    make_messages(4)

    def die(message: OutboxMessage) -> None:
        if message.payload == "1":
            raise Killed

    broker.answer = die
    relay_killed()
    assert broker.payloads == [0]
    make_due()
    relay_killed()
    assert broker.payloads == [0, 0]
    make_due()
    with pytest.raises(Killed):
        list(relay_batches())
    assert states() == [("sent", 3), ("pending", 3), ("pending", 2), ("pending", 2)], "from now on one at a time"
    assert sum(batch.sent for batch in relay_batches()) == 2, "the lease of the one that kills runs, not the others'"
    assert broker.payloads == [0, 0, 0, 2, 3]
    for _ in range(4, MAX_ATTEMPTS + 1):
        make_due()
        (new,) = make_messages(due=timedelta(0))
        relay_killed()
        assert message(new).state == MessageState.SENT, "what is new is sent and marked first"
    make_due()
    assert relay_once().dead == 1
    assert states()[:4] == [("sent", 3), ("dead", MAX_ATTEMPTS), ("sent", 3), ("sent", 3)]
    assert "A relay disappeared while it had this message" in OutboxMessage.objects.get(state=MessageState.DEAD).error


# What could not be sent


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
    assert states() == [("pending", MAX_ATTEMPTS - 1)]
    assert relay_once() == RelayResult(dead=1)
    assert states() == [("dead", MAX_ATTEMPTS)]
    make_due()
    assert relay_once() == RelayResult()
    broker.reset()
    requeue(message(pk), by="a test")
    assert relay_once() == RelayResult(sent=1)
    assert states() == [("sent", 1)]
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
        assert states() == [("pending", 0)] * 2
        assert all(3 < seconds_until_next_try(pk) <= 6 for pk in (first, second))
        make_due()
    assert message(first).error == "BrokerUnavailableError: no route"
    broker.reset()
    assert relay_once() == RelayResult(sent=2)
    assert states() == [("sent", 1)] * 2


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


# Order


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


def test_a_whole_order_is_sent_in_one_batch() -> None:
    make_messages(50, ordering_key="a")
    assert relay_once() == RelayResult(sent=50)
    assert broker.payloads == [*range(50)]


def test_what_is_behind_a_message_of_another_sender_waits_for_its_own() -> None:
    make_messages(1, ordering_key="a", sender=OTHER_SENDER)
    make_messages(1, ordering_key="a")
    assert relay_once(skip={SENDER}) == RelayResult(sent=1)
    assert states() == [("sent", 1), ("pending", 0)]


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
    counted = [attempts for _, attempts in states()]
    assert counted == ([1, 3, 1, 1, 1] if error is BROKEN else [1] * 5), "who waits is not tried"


def test_a_dead_message_holds_up_those_behind_it_until_it_is_requeued() -> None:
    (dead,) = make_messages(1, MessageState.DEAD, ordering_key="a", attempts=MAX_ATTEMPTS)
    make_messages(2, ordering_key="a", payload='"behind"')
    make_messages(1, payload='"elsewhere"')
    assert relay_once().sent == 1
    assert broker.payloads == ["elsewhere"]
    requeue(message(dead), by="a test")
    assert relay_once().sent == 3
    assert broker.payloads == ["elsewhere", 0, "behind", "behind"]


def test_one_that_is_not_due_holds_up_those_behind_it() -> None:
    make_messages(ordering_key="a", payload="1")
    make_messages(ordering_key="a", payload="2", due=HOUR)
    make_messages(ordering_key="a", payload="3")
    assert [batch.sent for batch in relay_batches()] == [1]
    make_due()
    assert [batch.sent for batch in relay_batches()] == [2]
    assert broker.payloads == [1, 2, 3]


def test_one_that_another_relay_is_sending_holds_up_those_behind_it() -> None:
    """It was the first of its order when that relay took it; an earlier one was committed after that."""
    make_messages(ordering_key="a", payload="1")
    make_messages(ordering_key="a", payload="2", lease=MINUTE, attempts=1)
    make_messages(ordering_key="a", payload="3")
    assert [batch.sent for batch in relay_batches()] == [1]
    assert broker.payloads == [1]


def test_what_a_killed_relay_left_of_an_order_is_sent_in_order() -> None:
    make_messages(4, ordering_key="a")
    faults.armed["relay.published"] = kill
    relay_killed()
    faults.armed.clear()
    make_due()
    list(relay_batches())
    assert broker.payloads == [0, 0, 1, 2, 3]


# What is told


@contextmanager
def receiving(signal: Any) -> Iterator[list[dict[str, Any]]]:
    received: list[dict[str, Any]] = []

    def receive(**kwargs: Any) -> None:
        assert not connection.in_atomic_block
        received.append(kwargs)

    signal.connect(receive)
    yield received
    signal.disconnect(receive)


def test_a_signal_tells_how_many_were_sent() -> None:
    make_messages(3)
    broker.refuse(1, error=BROKEN)
    with receiving(signals.relayed) as received:
        relay_once()
    (told,) = received
    assert (told["sender"], told["count"]) == (OutboxMessage, 2)


@pytest.mark.parametrize("lease", [None, -MINUTE])
def test_a_signal_tells_of_a_dead_message(lease: timedelta | None, caplog: pytest.LogCaptureFixture) -> None:
    attempts = MAX_ATTEMPTS - 1 if lease is None else MAX_ATTEMPTS
    (pk,) = make_messages(attempts=attempts, lease=lease, account_id="alice", payload='"secret"')
    broker.refuse("secret", error=BROKEN)
    with receiving(signals.message_dead) as received:
        assert relay_once().dead == 1
    dead = message(pk)
    (told,) = received
    assert told["sender"] is OutboxMessage
    assert told["message_id"] == dead.message_id
    assert (told["account_id"], told["idempotency_key"]) == ("alice", dead.idempotency_key)
    assert (told["topic"], told["attempt"]) == ("orders.placed", MAX_ATTEMPTS)
    assert f"Message {dead.message_id} on orders.placed is dead" in caplog.text
    assert "secret" not in caplog.text


def test_the_report_is_plain_data() -> None:
    report = relay.describe(RelayResult(sent=1, postponed=2, dead=3, put_back=4, unavailable={"a": "b"}))
    assert json.loads(json.dumps(report)) == report
    assert report == {"sent": 1, "postponed": 2, "dead": 3, "put_back": 4, "unavailable": {"a": "b"}}


# How it is found


@contextmanager
def before_taking(call: Callable[[], None]) -> Iterator[None]:
    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "SKIP LOCKED" in sql:
            call()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        yield


def in_thread(call: Callable[[], Any]) -> Any:
    def run() -> Any:
        try:
            return call()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(max_workers=1) as elsewhere:
        return elsewhere.submit(run).result(60)


@pytest.fixture
def repeatable_read() -> Iterator[None]:
    set_level = "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL "
    with connection.cursor() as cursor:
        cursor.execute(set_level + "REPEATABLE READ")
    yield
    with connection.cursor() as cursor:
        cursor.execute(set_level + "READ COMMITTED")


@pytest.mark.postgres
@pytest.mark.usefixtures("repeatable_read")
def test_fm_16_a_batch_refused_because_of_another_relay_is_taken_again() -> None:
    first, _ = make_messages(2)
    rounds: list[int] = []

    def take_first() -> None:
        if not rounds:
            in_thread(lambda: OutboxMessage.objects.filter(pk=first).update(lease_expires_at=from_now(MINUTE)))
        rounds.append(1)

    with before_taking(take_first):
        assert relay_once().sent == 1
    assert len(rounds) == 2


@pytest.mark.postgres
@pytest.mark.usefixtures("repeatable_read")
def test_fm_16_a_batch_is_not_taken_again_for_ever() -> None:
    make_messages(2)
    rounds: list[int] = []

    def touch() -> None:
        rounds.append(1)
        in_thread(lambda: OutboxMessage.objects.update(attempts=len(rounds)))

    with before_taking(touch), pytest.raises(OperationalError, match="could not serialize"):
        relay_once()
    assert len(rounds) == 5


@pytest.mark.postgres
def test_a_batch_is_found_through_the_indexes_of_what_is_not_sent() -> None:
    make_messages(3_000, MessageState.SENT, sent=-HOUR, ordering_key="a")
    make_messages(20, ordering_key="a")
    make_messages(20)
    plans: list[str] = []
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE idempotency_outbox")

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "FOR UPDATE" in sql:
            with connection.cursor() as cursor:
                cursor.cursor.execute(f"EXPLAIN {sql}", params)
                plans.append("\n".join(line for (line,) in cursor.fetchall()))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        assert relay_once().sent == 40
    heads, followers = plans
    assert "idempotency_outbox_unsent" in heads
    assert "idempotency_outbox_order" in heads
    assert "idempotency_outbox_order" in followers
    assert "Seq Scan" not in heads + followers
