"""A relay that is killed, frozen, or not alone: nothing is lost, and what is sent again has the same id."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db.models import F

from idempotency.models import MessageStatus, OutboxMessage
from idempotency.outbox import relay
from idempotency.outbox.relay import MAX_ATTEMPTS, RelayResult, relay_batches, relay_once
from idempotency.protocol import faults
from tests.database.relay.trouble import BROKEN, UNREACHABLE, Killed, kill, message, relay_killed
from tests.outbox import broker, make_due, make_messages, statuses
from tests.records import MINUTE, from_now

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.failure_mode(53)
def test_a_relay_killed_between_publishing_and_marking_sends_again_with_the_same_id() -> None:
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
    assert statuses() == [("sent", 2)] * 3


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
    assert statuses() == [("sent", 2)] * 2


@pytest.mark.parametrize("error", [BROKEN, UNREACHABLE])
def test_a_frozen_relay_does_not_undo_what_another_has_sent(error: Exception) -> None:
    make_messages(2)

    def overtake_then_fail() -> None:
        overtake()
        broker.refuse(0, 1, error=error)

    faults.armed["relay.claimed"] = overtake_then_fail
    result = relay_once()
    assert (result.sent, result.postponed, result.put_back) == (0, 0, 0)
    assert statuses() == [("sent", 2)] * 2


@pytest.mark.parametrize(("error", "attempts"), [(BROKEN, 0), (BROKEN, MAX_ATTEMPTS - 1), (UNREACHABLE, 0)])
def test_a_frozen_relay_does_not_take_a_message_from_who_is_sending_it(error: Exception, attempts: int) -> None:
    (pk,) = make_messages(attempts=attempts)

    def another_takes_it() -> None:
        OutboxMessage.objects.update(attempts=F("attempts") + 1, lease_expires_at=from_now(MINUTE))
        broker.refuse(0, error=error)

    faults.armed["relay.claimed"] = another_takes_it
    assert relay_once().touched == 0
    assert (message(pk).status, message(pk).attempts) == ("pending", attempts + 2)
    assert message(pk).lease_expires_at is not None
    assert relay_once().sent == 0


def test_a_slow_relay_that_gets_its_confirmation_says_so_whoever_has_the_message_by_now() -> None:
    make_messages()
    faults.armed["relay.published"] = lambda: OutboxMessage.objects.update(
        attempts=F("attempts") + 1, lease_expires_at=from_now(MINUTE)
    )
    assert relay_once().sent == 1
    assert statuses() == [("sent", 2)]


@pytest.mark.parametrize("error", [BROKEN, UNREACHABLE])
def test_a_failure_undoes_no_confirmation_of_the_relay_before(error: Exception) -> None:
    """That one was slow, and got its confirmation while this one had the message."""
    make_messages()
    broker.refuse(0, error=error)
    faults.armed["relay.claimed"] = lambda: OutboxMessage.objects.update(status=MessageStatus.SENT)
    result = relay_once()
    assert (result.sent, result.postponed, result.put_back) == (0, 0, 0)
    assert statuses() == [("sent", 1)]


def test_a_relay_that_has_used_half_of_its_lease_puts_the_rest_back(monkeypatch: pytest.MonkeyPatch) -> None:
    make_messages(3)
    clock = [0.0]
    monkeypatch.setattr(relay, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def take_long(message: OutboxMessage) -> None:
        clock[0] += relay.LEASE.total_seconds() / 2

    broker.answer = take_long
    assert relay_once() == RelayResult(sent=1, put_back=2, exhausted=False)
    assert statuses() == [("sent", 1), ("pending", 0), ("pending", 0)]
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
    assert statuses() == [("sent", 3), ("pending", 3), ("pending", 2), ("pending", 2)], "from now on one at a time"
    assert sum(batch.sent for batch in relay_batches()) == 2, "the lease of the one that kills runs, not the others'"
    assert broker.payloads == [0, 0, 0, 2, 3]
    for _ in range(4, MAX_ATTEMPTS + 1):
        make_due()
        (new,) = make_messages(due=timedelta(0))
        relay_killed()
        assert message(new).status == MessageStatus.SENT, "what is new is sent and marked first"
    make_due()
    assert relay_once().dead == 1
    assert statuses()[:4] == [("sent", 3), ("dead", MAX_ATTEMPTS), ("sent", 3), ("sent", 3)]
    assert "A relay disappeared while it had this message" in OutboxMessage.objects.get(status=MessageStatus.DEAD).error
