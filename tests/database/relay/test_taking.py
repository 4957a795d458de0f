"""How a batch is found, through the indexes of what is not sent, and taken again if another relay interferes."""

from __future__ import annotations

import pytest
from django.db import OperationalError, connection

from idempotency.models import MessageStatus, OutboxMessage
from idempotency.outbox.relay import relay_once
from tests.database.statements import before_statement, explaining, in_thread
from tests.outbox import make_messages
from tests.records import HOUR, MINUTE, from_now

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.failure_mode(16)
@pytest.mark.postgres
@pytest.mark.usefixtures("repeatable_read")
def test_a_batch_refused_because_of_another_relay_is_taken_again() -> None:
    first, _ = make_messages(2)
    rounds: list[int] = []

    def take_first() -> None:
        if not rounds:
            in_thread(lambda: OutboxMessage.objects.filter(pk=first).update(lease_expires_at=from_now(MINUTE)))
        rounds.append(1)

    with before_statement("SKIP LOCKED", take_first):
        assert relay_once().sent == 1
    assert len(rounds) == 2


@pytest.mark.failure_mode(16)
@pytest.mark.postgres
@pytest.mark.usefixtures("repeatable_read")
def test_a_batch_is_not_taken_again_for_ever() -> None:
    make_messages(2)
    rounds: list[int] = []

    def touch() -> None:
        rounds.append(1)
        in_thread(lambda: OutboxMessage.objects.update(attempts=len(rounds)))

    with before_statement("SKIP LOCKED", touch), pytest.raises(OperationalError, match="could not serialize"):
        relay_once()
    assert len(rounds) == 5


@pytest.mark.postgres
def test_a_batch_is_found_through_the_indexes_of_what_is_not_sent() -> None:
    make_messages(3_000, MessageStatus.SENT, sent=-HOUR, ordering_key="a")
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
