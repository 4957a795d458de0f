"""How a batch is found, through the indexes of what is not sent, and taken again if another relay interferes."""

from __future__ import annotations

import pytest
from django.db import connection

from idempotency.models import MessageStatus
from idempotency.outbox.relay import relay_once
from tests.database.statements import explaining
from tests.outbox import make_messages
from tests.records import HOUR

pytestmark = pytest.mark.django_db(transaction=True)


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
