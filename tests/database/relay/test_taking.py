"""How a batch is found, through the indexes of what is not sent, and taken again if another relay interferes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import OperationalError, connection, connections

from idempotency.models import MessageState, OutboxMessage
from idempotency.relay import relay_once
from tests.outbox import make_messages
from tests.records import HOUR, MINUTE, from_now

pytestmark = pytest.mark.django_db(transaction=True)


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
