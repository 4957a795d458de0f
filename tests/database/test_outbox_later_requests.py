"""A key reused after its retention makes a new request, whose messages are new to their consumers."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import transaction

from idempotency import claim, require_claim
from idempotency.exceptions import MessageReusedError
from idempotency.models import IdempotencyRecord
from idempotency.outbox import publish, publishing
from idempotency.outbox.models import OutboxMessage
from idempotency.outbox.relay import relay_once
from idempotency.outbox.upkeep import purge_sent_batches
from tests.database.publishing import ids, inside, outside, run, send
from tests.outbox import SENDER, broker
from tests.records import HOUR, from_now

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.scenario_5]

DAY = timedelta(days=1)

record_may_be_purged = pytest.mark.parametrize(
    "purged", [False, True], ids=["the record is kept", "the record was purged"]
)


def end_retention():
    """Let four days pass, which is longer than the records' retention."""
    IdempotencyRecord.objects.update(expires_at=from_now(-DAY), created_at=from_now(-4 * DAY))
    OutboxMessage.objects.update(created_at=from_now(-4 * DAY))


def consume(message):
    """Whether an idempotent consumer runs for this message."""
    with claim("tests.outbox.consumer", account_id=message.account_id, key=message.idempotency_key) as attempt:
        return not attempt.replayed


@pytest.mark.parametrize("operation", [inside, outside], ids=lambda operation: operation.name)
@record_may_be_purged
def test_a_consumer_that_remembers_the_first_request_runs_for_the_second(operation, purged):
    run(operation, lambda: send(payload="same"))
    relay_once()
    assert consume(OutboxMessage.objects.get())
    end_retention()
    if purged:
        IdempotencyRecord.objects.filter(operation=operation.name).delete()
    IdempotencyRecord.objects.filter(operation="tests.outbox.consumer").update(expires_at=from_now(HOUR))
    run(operation, lambda: send(payload="same"))
    assert relay_once().sent == 1
    assert broker.payloads == ["same", "same"]
    assert consume(OutboxMessage.objects.latest("pk"))


def test_unsent_messages_of_earlier_requests_are_sent_with_the_new_one():
    for payload in ("first", "second", "third"):
        run(inside, lambda payload=payload: send(payload=payload))
        end_retention()
    assert len(set(ids())) == 3
    assert relay_once().sent == 3
    assert broker.payloads == ["first", "second", "third"]


@pytest.mark.parametrize("purged", [False, True], ids=["the old message is kept", "the old message was purged"])
def test_every_attempt_of_the_new_request_publishes_the_same_message(purged):
    run(outside, lambda: send(payload="first"))
    relay_once()
    end_retention()
    run(outside, lambda: send(payload="second"), cut_off=True)
    new = OutboxMessage.objects.latest("pk")
    if purged:
        OutboxMessage.objects.exclude(pk=new.pk).delete()
    run(outside, lambda: send(payload="second"))
    assert OutboxMessage.objects.latest("pk").pk == new.pk
    assert relay_once().sent == 1
    assert broker.payloads == ["first", "second"]


@record_may_be_purged
def test_a_name_for_two_messages_is_refused_in_a_new_request_too(purged):
    def block():
        with transaction.atomic():
            before = publish("orders.placed", 1, name="it", sender=SENDER)
            assert publish("orders.placed", 1, name="it", sender=SENDER).pk == before.pk
            with pytest.raises(MessageReusedError):
                publish("orders.placed", 2, name="it", sender=SENDER)

    run(inside, lambda: send(payload=0, name="it"))
    end_retention()
    if purged:
        IdempotencyRecord.objects.all().delete()
    run(inside, block)
    assert [message.payload for message in OutboxMessage.objects.order_by("pk")] == ["0", "1"]


def test_a_crash_that_loses_record_and_message_changes_no_id():
    """To its consumer, a message sent before and after a database is restored is the same."""
    run(inside, send)
    first = ids()
    IdempotencyRecord.objects.all().delete()
    OutboxMessage.objects.all().delete()
    run(inside, send)
    assert ids() == first


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_record_in_another_database_decides_nothing_about_messages(attempts):
    """A crash of that database may lose the record while the message is kept."""

    def elsewhere():
        owned = require_claim().ownership
        here, owned.store = owned.store, SimpleNamespace(using="elsewhere")
        send(using=here.using)
        owned.store = here

    run(outside, elsewhere, cut_off=attempts == 2)
    IdempotencyRecord.objects.exclude(status="in_progress").delete()
    run(outside, elsewhere)
    assert OutboxMessage.objects.count() == 1


def test_a_message_purged_between_insert_and_read_is_published_again(monkeypatch):
    run(inside, lambda: send(payload="first"))
    relay_once()
    end_retention()
    insert = publishing.insert_message

    def slow(*arguments):
        inserted = insert(*arguments)
        OutboxMessage.objects.filter(status="sent").delete()
        return inserted

    monkeypatch.setattr(publishing, "insert_message", slow)
    run(inside, lambda: send(payload="second"))
    assert relay_once().sent == 1
    assert broker.payloads == ["first", "second"]


def test_a_sent_message_outlives_the_record_of_a_late_consumer():
    run(inside, send)
    relay_once()
    OutboxMessage.objects.update(sent_at=from_now(-3 * DAY - HOUR))
    assert next(purge_sent_batches()).deleted == 0
    OutboxMessage.objects.update(sent_at=from_now(-4 * DAY - HOUR))
    assert next(purge_sent_batches()).deleted == 1
