"""Stored messages: how many wait, how a dead one is requeued, and when a sent one is purged."""

import logging
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import override_settings
from django.utils import timezone

from idempotency.operate.resolutions import ResolutionRefusedError
from idempotency.outbox import upkeep as messages
from idempotency.outbox.models import MessageStatus, OutboxMessage
from idempotency.outbox.upkeep import Backlog, backlog, purge_sent_batches, requeue
from tests.database.statements import explaining, fill_outbox
from tests.outbox import make_messages, statuses
from tests.records import HOUR, from_now

pytestmark = pytest.mark.django_db(transaction=True)

DAY = timedelta(days=1)


@pytest.mark.parametrize("waiting", [0, 1], ids=["empty", "not due yet"])
def test_without_a_due_message_there_is_no_delay(waiting):
    make_messages(3, MessageStatus.SENT, sent=-HOUR)
    make_messages(waiting, due=HOUR)
    assert backlog() == Backlog(pending=waiting, oldest_due=None, dead=0)


def test_the_backlog_has_unsent_and_dead_counts_and_the_longest_delay():
    make_messages(2, due=-HOUR)
    make_messages(due=-2 * HOUR)
    make_messages(2, due=HOUR)
    make_messages(4, MessageStatus.DEAD, due=-3 * HOUR)
    found = backlog()
    assert found == Backlog(pending=5, oldest_due=found.oldest_due, dead=4)
    assert abs(found.oldest_due - 2 * HOUR) < timedelta(minutes=1)


def test_counting_has_a_bound(monkeypatch):
    monkeypatch.setattr(messages, "MAX_COUNTED", 2)
    make_messages(3)
    make_messages(3, MessageStatus.DEAD)
    assert (backlog().pending, backlog().dead) == (2, 2)


@pytest.mark.postgres
def test_the_backlog_is_read_from_the_index_of_unsent_messages():
    fill_outbox(3_000)
    make_messages(5)
    make_messages(5, MessageStatus.DEAD)
    with explaining("idempotency_outbox_message") as plans:
        backlog()
    assert len(plans) == 3
    for plan in plans:
        assert "idempotency_outbox_unsent" in plan
        assert "Seq Scan" not in plan


def test_a_dead_message_is_requeued_as_if_it_were_new(caplog):
    (pk,) = make_messages(1, MessageStatus.DEAD, attempts=16, error="no such queue", due=-DAY)
    dead = OutboxMessage.objects.get()
    with caplog.at_level(logging.INFO, "idempotency.audit"):
        requeue(dead, by="the night shift", reason="queue made")
    now = OutboxMessage.objects.get(pk=pk)
    assert (now.status, now.attempts, now.message_id) == (MessageStatus.PENDING, 0, dead.message_id)
    assert abs(timezone.now() - now.next_try_at) < timedelta(minutes=1)
    assert now.error == "no such queue", "the error is kept until the message is sent"
    assert dead.status == MessageStatus.DEAD, "the caller's object is unchanged"
    line = f"Message {dead.message_id} on 'orders.placed': requeued by 'the night shift', reason: 'queue made'"
    assert line in caplog.text
    assert not LogEntry.objects.exists()


def test_a_requeue_by_a_user_adds_an_entry_to_the_admin_log():
    user = User.objects.create(username="operator")
    expected = []
    for reason, message in (("queue made", "requeued: queue made"), ("", "requeued")):
        (pk,) = make_messages(1, MessageStatus.DEAD)
        dead = OutboxMessage.objects.get(pk=pk)
        requeue(dead, by=user, reason=reason)
        expected.append((user.pk, str(pk), f"orders.placed {dead.message_id}", message))
    entries = LogEntry.objects.order_by("pk").values_list("user_id", "object_id", "object_repr", "change_message")
    assert [*entries] == expected


@pytest.mark.parametrize(
    ("status", "change", "message"),
    [
        (MessageStatus.PENDING, {}, "not dead"),
        (MessageStatus.SENT, {}, "not dead"),
        (MessageStatus.DEAD, {"attempts": 4}, "has changed"),  # it died again
        (MessageStatus.DEAD, {"next_try_at": from_now(DAY)}, "has changed"),
    ],
    ids=["pending", "sent", "attempts", "next_try_at"],
)
def test_only_a_dead_message_that_has_not_changed_is_requeued(status, change, message):
    make_messages(1, status, attempts=3)
    seen = OutboxMessage.objects.get()
    OutboxMessage.objects.update(**{"attempts": 3} | change)
    with pytest.raises(ResolutionRefusedError, match=message):
        requeue(seen, by=User.objects.create(username="operator"))
    assert statuses() == [(status, change.get("attempts", 3))]
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize("by", ["", None, 1])
def test_a_requeue_requires_a_by_argument(by):
    make_messages(1, MessageStatus.DEAD)
    with pytest.raises(TypeError, match="by="):
        requeue(OutboxMessage.objects.get(), by=by)
    assert statuses() == [("dead", 0)]


def test_a_purge_deletes_only_messages_sent_before_the_retention():
    make_messages(3, MessageStatus.SENT, sent=-4 * DAY)
    remains = {
        *make_messages(2, MessageStatus.SENT, sent=-2 * DAY),
        *make_messages(2, due=-40 * DAY),
        *make_messages(2, MessageStatus.DEAD, due=-40 * DAY),
    }
    result = next(purge_sent_batches())
    assert (result.deleted, result.exhausted) == (3, True)
    assert set(OutboxMessage.objects.values_list("pk", flat=True)) == remains
    assert next(purge_sent_batches()) == messages.PurgeResult()
    with override_settings(IDEMPOTENCY={"RETENTION": DAY}):
        assert next(purge_sent_batches()).deleted == 2
