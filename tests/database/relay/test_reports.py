"""What a relay tells of its work: signals, log lines, and a report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from idempotency import signals
from idempotency.models import OutboxMessage
from idempotency.outbox.relay import MAX_ATTEMPTS, relay_once
from tests.database.relay.trouble import BROKEN, message
from tests.outbox import broker, make_messages
from tests.records import MINUTE

pytestmark = pytest.mark.django_db(transaction=True)


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
