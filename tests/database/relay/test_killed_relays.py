"""A relay that is killed, frozen, or not alone: nothing is lost, and what is sent again has the same id."""

from __future__ import annotations

from collections.abc import Callable
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
@pytest.mark.parametrize(
    ("place", "before", "after"),
    [("relay.claimed", [], [0, 1]), ("relay.published", [0], [0, 1]), ("relay.marked", [0, 1], [])],
)
def test_what_a_killed_relay_has_not_marked_is_sent_again_with_the_same_id(
    place: str, before: list[int], after: list[int]
) -> None:
    make_messages(2)
    faults.armed[place] = kill
    relay_killed()
    faults.armed.clear()
    assert broker.payloads == before
    assert relay_once().sent == 0, "the lease of the dead relay runs"
    make_due()
    assert sum(batch.sent for batch in relay_batches()) == len(after)
    assert broker.payloads == before + after
    assert len(set(broker.ids)) == 2
    assert statuses() == [("sent", 2 if after else 1)] * 2


def another_has_sent_it() -> None:
    """The lease is over, and another relay sends what this one has taken."""
    faults.armed.clear()
    make_due()
    relay_once()


def an_earlier_one_is_confirmed() -> None:
    """It was slow, and got its confirmation while this one had the message."""
    OutboxMessage.objects.update(status=MessageStatus.SENT)


def another_is_sending_it() -> None:
    OutboxMessage.objects.update(attempts=F("attempts") + 1, lease_expires_at=from_now(MINUTE))


@pytest.mark.parametrize("error", [BROKEN, UNREACHABLE])
@pytest.mark.parametrize(
    ("meanwhile", "left"),
    [
        (another_has_sent_it, ("sent", 2)),
        (an_earlier_one_is_confirmed, ("sent", 1)),
        (another_is_sending_it, ("pending", 2)),
    ],
)
def test_the_failure_of_a_frozen_relay_undoes_nothing_of_another(
    meanwhile: Callable[[], None], left: tuple[str, int], error: Exception
) -> None:
    def freeze() -> None:
        meanwhile()
        broker.refuse(0, error=error)

    make_messages()
    faults.armed["relay.claimed"] = freeze
    assert relay_once().touched == 0
    assert statuses() == [left]
    assert relay_once().touched == 0, "the message is not taken from who has it"


@pytest.mark.parametrize(("meanwhile", "sent"), [(another_has_sent_it, 0), (another_is_sending_it, 1)])
def test_the_first_confirmation_counts_whoever_has_the_message_by_now(meanwhile: Callable[[], None], sent: int) -> None:
    make_messages()
    faults.armed["relay.claimed"] = meanwhile
    assert relay_once().sent == sent
    assert statuses() == [("sent", 2)]
    assert len(set(broker.ids)) == 1


def test_a_frozen_relay_does_not_declare_a_message_dead_that_another_is_sending() -> None:
    make_messages(attempts=MAX_ATTEMPTS - 1)
    faults.armed["relay.claimed"] = another_is_sending_it
    broker.refuse(0, error=BROKEN)
    assert relay_once().touched == 0
    assert statuses() == [("pending", MAX_ATTEMPTS + 1)]


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
