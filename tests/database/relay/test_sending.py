"""What is due is sent, longest due first, for a bounded number of statements, through the indexes of what is unsent."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from idempotency.models import MessageStatus, OutboxMessage
from idempotency.outbox.relay import RelayResult, relay_once
from tests.database.plans import fill_outbox
from tests.database.relay.trouble import BROKEN
from tests.database.statements import explaining
from tests.outbox import broker, make_messages
from tests.records import HOUR, MINUTE

pytestmark = pytest.mark.django_db(transaction=True)


def test_what_is_due_is_sent_longest_due_first_and_marked() -> None:
    make_messages(due=-MINUTE, payload='"second"')
    make_messages(due=-HOUR, payload='"first"')
    make_messages(due=HOUR, payload='"later"')
    make_messages(status=MessageStatus.SENT, payload='"sent before"')
    make_messages(status=MessageStatus.DEAD, payload='"dead"')
    assert relay_once() == RelayResult(sent=2)
    assert broker.payloads == ["first", "second"]
    sent = OutboxMessage.objects.filter(attempts=1)
    assert {(one.status, one.attempts, one.lease_expires_at, one.error) for one in sent} == {("sent", 1, None, "")}
    assert all(abs((one.sent_at - timezone.now()).total_seconds()) < 60 for one in sent if one.sent_at)
    assert relay_once() == RelayResult()


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
    assert statements_of(1) == statements_of(20) == expected
    # In an order: one more, for what comes behind the first ones.
    assert statements_of(2, ordering_key="k") == statements_of(20, ordering_key="k") == expected + 1
    # A batch that fails for one reason is put off by one statement, in place of the mark.
    broker.refuse(*range(20), error=BROKEN)
    assert statements_of(1) == statements_of(20) == expected
    assert statements_of(0) == expected - 2


@pytest.mark.postgres
def test_a_batch_is_found_through_the_indexes_of_what_is_not_sent() -> None:
    fill_outbox(3_000, ordering_key="a")
    make_messages(20, ordering_key="a")
    make_messages(20)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE idempotency_outbox")
    with explaining("FOR UPDATE") as plans:
        assert relay_once().sent == 40
    heads, followers = plans
    assert "idempotency_outbox_unsent" in heads
    assert "idempotency_outbox_order" in heads
    assert "idempotency_outbox_order" in followers
    assert "Seq Scan" not in heads + followers
