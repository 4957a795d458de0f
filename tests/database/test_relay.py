"""The relay sends due messages with a bounded number of statements, even if a relay is killed or frozen."""

from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from django.db import connection
from django.db.models import F
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from idempotency.outbox import relay
from idempotency.outbox.models import MessageStatus, OutboxMessage
from idempotency.outbox.relay import MAX_ATTEMPTS, RelayResult, relay_batches, relay_once
from idempotency.protocol import faults
from tests.concurrency.failures import Killed
from tests.database.statements import explaining, fill_outbox
from tests.outbox import BROKEN, UNREACHABLE, broker, make_due, make_messages, statuses
from tests.records import HOUR, MINUTE, from_now

pytestmark = pytest.mark.django_db(transaction=True)


def relay_killed(place=None):
    """Run a relay that is killed at this fault point, or by its message."""
    if place:
        faults.fault_point[place] = Mock(side_effect=Killed)
    with pytest.raises(Killed):
        relay_once()
    faults.disarm()


def test_due_messages_are_sent_longest_due_first_outside_a_transaction():
    held = []
    broker.answer = lambda message: held.append(connection.in_atomic_block)
    make_messages(due=-MINUTE, payload='"second"')
    make_messages(due=-HOUR, payload='"first"')
    make_messages(due=HOUR, payload='"later"')
    make_messages(status=MessageStatus.SENT, payload='"sent before"')
    make_messages(status=MessageStatus.DEAD, payload='"dead"')
    assert relay_once() == RelayResult(sent=2)
    assert (broker.payloads, held) == (["first", "second"], [False, False])
    sent = OutboxMessage.objects.filter(attempts=1)
    assert {(one.status, one.attempts, one.lease_expires_at, one.error) for one in sent} == {("sent", 1, None, "")}
    assert all(abs((one.sent_at - timezone.now()).total_seconds()) < 60 for one in sent)
    assert relay_once() == RelayResult()


def statements_of(count):
    OutboxMessage.objects.all().delete()
    make_messages(count)
    with CaptureQueriesContext(connection) as statements:
        relay_once()
    return len(statements)


@pytest.mark.except_citus  # where it also queries whether the table is distributed
def test_a_batch_costs_the_same_statements_however_many_it_sends():
    # BEGIN, select, lease, COMMIT and mark. PostgreSQL sets a timeout first, and MariaDB selects in more statements.
    expected = {"sqlite": 5, "postgresql": 6, "mysql": 7}[connection.vendor]
    assert statements_of(1) == statements_of(20) == expected
    # One statement postpones a batch that fails for one reason. It replaces the mark.
    broker.refuse(*range(20), error=BROKEN)
    assert statements_of(1) == statements_of(20) == expected
    assert statements_of(0) == (4 if connection.vendor == "postgresql" else 3)


@pytest.mark.postgres
def test_a_batch_is_found_through_the_index_of_unsent_messages():
    fill_outbox(3_000)
    make_messages(20)
    with explaining("ORDER BY") as plans:
        assert relay_once().sent == 20
    (plan,) = plans
    assert "idempotency_outbox_unsent" in plan
    assert "Seq Scan" not in plan


# A relay that is killed, frozen or concurrent: no message is lost, and one sent again keeps its id


@pytest.mark.failure_53
@pytest.mark.parametrize(
    ("place", "before", "after"),
    [("relay.claimed", [], [0, 1]), ("relay.published", [0], [0, 1]), ("relay.marked", [0, 1], [])],
)
def test_unmarked_messages_of_a_killed_relay_are_sent_again_with_their_ids(place, before, after):
    make_messages(2)
    relay_killed(place)
    assert broker.payloads == before
    assert relay_once().sent == 0, "the dead relay's lease is still running"
    make_due()
    assert sum(batch.sent for batch in relay_batches()) == len(after)
    assert broker.payloads == before + after
    assert len(set(broker.ids)) == 2
    assert statuses() == [("sent", 2 if after else 1)] * 2


def another_has_sent_it():
    """The lease ends, and another relay sends the message that this one has taken."""
    faults.disarm()
    make_due()
    relay_once()


def an_earlier_one_is_confirmed():
    """A slow earlier relay gets its confirmation while this one owns the message."""
    OutboxMessage.objects.update(status=MessageStatus.SENT)


def another_is_sending_it():
    OutboxMessage.objects.update(attempts=F("attempts") + 1, lease_expires_at=from_now(MINUTE))


@pytest.mark.parametrize("error", [BROKEN, UNREACHABLE])
@pytest.mark.parametrize(
    ("meanwhile", "attempts", "left"),
    [
        (another_has_sent_it, 0, ("sent", 2)),
        (an_earlier_one_is_confirmed, 0, ("sent", 1)),
        (another_is_sending_it, 0, ("pending", 2)),
        (another_is_sending_it, MAX_ATTEMPTS - 1, ("pending", MAX_ATTEMPTS + 1)),  # and not dead
    ],
)
def test_a_failure_of_a_frozen_relay_does_not_undo_another_relays_work(meanwhile, attempts, left, error):
    def freeze():
        meanwhile()
        broker.refuse(0, error=error)

    make_messages(attempts=attempts)
    faults.fault_point["relay.claimed"] = freeze
    assert relay_once().touched == 0
    assert statuses() == [left]
    assert relay_once().touched == 0, "the message stays with its owner"


@pytest.mark.parametrize(("meanwhile", "sent"), [(another_has_sent_it, 0), (another_is_sending_it, 1)])
def test_the_first_confirmation_counts_even_after_a_take_over(meanwhile, sent):
    make_messages()
    faults.fault_point["relay.claimed"] = meanwhile
    assert relay_once().sent == sent
    assert statuses() == [("sent", 2)]
    assert len(set(broker.ids)) == 1


def test_a_relay_that_has_used_half_of_its_lease_puts_the_rest_back(monkeypatch):
    make_messages(3)
    clock = [0.0]
    monkeypatch.setattr(relay, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def take_long(message):
        clock[0] += relay.LEASE.total_seconds() / 2

    broker.answer = take_long
    assert relay_once() == RelayResult(sent=1, put_back=2, exhausted=False)
    assert statuses() == [("sent", 1), ("pending", 0), ("pending", 0)]
    broker.reset()
    assert relay_once() == RelayResult(sent=2)
    assert broker.payloads == [1, 2]


def test_a_message_that_kills_its_relay_dies_alone():
    make_messages(4)
    broker.refuse(1, error=Killed())
    for times in (1, 2):
        relay_killed()
        assert broker.payloads == [0] * times
        make_due()
    with pytest.raises(Killed):
        list(relay_batches())
    assert statuses() == [("sent", 3), ("pending", 3), ("pending", 2), ("pending", 2)], "from now on, one at a time"
    assert sum(batch.sent for batch in relay_batches()) == 2, "only the message that kills is still leased"
    assert broker.payloads == [0, 0, 0, 2, 3]
    for _ in range(4, MAX_ATTEMPTS + 1):
        make_due()
        (new,) = make_messages(due=timedelta(0))
        relay_killed()
        assert OutboxMessage.objects.get(pk=new).status == MessageStatus.SENT, "new messages are sent and marked first"
    make_due()
    assert relay_once().dead == 1
    assert statuses()[:4] == [("sent", 3), ("dead", MAX_ATTEMPTS), ("sent", 3), ("sent", 3)]
    assert "A relay disappeared while it had this message" in OutboxMessage.objects.get(status=MessageStatus.DEAD).error
