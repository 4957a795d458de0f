"""Relays at once, killed and frozen; publishers that commit out of order. Real connections and real processes."""

from __future__ import annotations

import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.db import connection, transaction

from idempotency import Operation, claim
from idempotency.exceptions import LeaseLostError
from idempotency.lifecycle import Recovery
from idempotency.models import IdempotencyRecord, MessageStatus, OutboxMessage
from idempotency.outbox import publish
from idempotency.outbox.relay import RelayResult, relay_batches, relay_once
from tests.concurrency.racing import Gate, in_background, race
from tests.database import processes
from tests.outbox import FILE_SENDER, SENDER, broker, make_due, make_messages, statuses
from tests.records import HOUR, from_now

pytestmark = pytest.mark.django_db(transaction=True)

retried = Operation("tests.outbox_races.retried", transaction=False, recovery=Recovery.REEXECUTE)


@pytest.fixture(autouse=True)
def _empty_broker() -> None:
    broker.reset()


def publish_one(payload: object, **options: Any) -> OutboxMessage:
    with transaction.atomic():
        return publish("orders.placed", payload, sender=SENDER, **options)


# Publishers


@pytest.mark.failure_mode(55)
@pytest.mark.postgres
def test_a_lower_id_that_commits_after_a_higher_one_was_sent_is_sent() -> None:
    gate = Gate()

    def publish_slowly() -> int:
        with transaction.atomic():
            message = publish("orders.placed", "first written", sender=SENDER)
            gate.pass_through()
        return message.pk

    with ThreadPoolExecutor(1) as pool:
        slow = in_background(pool, publish_slowly)
        gate.wait_until_reached()
        higher = publish_one("first committed").pk
        assert relay_once().sent == 1
        assert broker.payloads == ["first committed"]
        gate.open()
        lower = slow.result(60)
    assert lower < higher
    assert relay_once().sent == 1
    assert broker.payloads == ["first committed", "first written"]


@pytest.mark.postgres
def test_two_attempts_that_publish_at_once_publish_one_message() -> None:
    """One was frozen in its transaction; the other took over, and waits for the first one's end."""
    first_gate, second_gate = Gate(), Gate()

    def attempt(gate: Gate, *, inside: bool) -> UUID:
        with claim(retried, account_id="alice", key="k"):
            if not inside:
                gate.pass_through()
            with transaction.atomic():
                message = publish("orders.placed", {"id": 1}, sender=SENDER)
                if inside:
                    gate.pass_through()
        return message.message_id

    def overtaken() -> None:
        with pytest.raises(LeaseLostError):
            attempt(first_gate, inside=True)

    with ThreadPoolExecutor(2) as pool:
        first = in_background(pool, overtaken)
        first_gate.wait_until_reached()
        IdempotencyRecord.objects.update(lease_expires_at=from_now(-HOUR))
        second = in_background(pool, partial(attempt, second_gate, inside=False))
        second_gate.wait_until_reached()
        second_gate.open()
        first_gate.open()
        first.result(60)
        published = second.result(60)
    assert OutboxMessage.objects.get().message_id == published
    assert relay_once().sent == 1


# Relays at once


@pytest.mark.parametrize("batch_size", [3, 100])
def test_relays_at_once_send_each_message_once(batch_size: int) -> None:
    make_messages(120)

    def relay() -> int:
        return sum(batch.sent for batch in relay_batches(batch_size=batch_size))

    assert sum(race([relay] * 4)) == 120
    assert sorted(broker.payloads) == [*range(120)]
    assert statuses() == [("sent", 1)] * 120


def test_relays_at_once_keep_the_order_of_each_key() -> None:
    for number in range(20):
        for key in "abc":
            make_messages(ordering_key=key, payload=f'"{key} {number}"')

    def relay() -> RelayResult:
        return sum(relay_batches(batch_size=4), RelayResult())

    race([relay] * 4)
    # A relay that found a key held up by another one may have ended before that one has sent it all.
    list(relay_batches())
    assert len(broker.payloads) == 60
    for key in "abc":
        assert [one for one in broker.payloads if one[0] == key] == [f"{key} {number}" for number in range(20)]


def test_relays_and_publishers_at_once_lose_nothing() -> None:
    def publish_some(start: int) -> int:
        for number in range(start, start + 25):
            with transaction.atomic():
                publish("orders.placed", number, sender=SENDER)
                transaction.set_rollback(number % 5 == 0)  # FM 54, under load
        return 0

    def relay() -> int:
        return sum(sum(batch.sent for batch in relay_batches(batch_size=5)) for _ in range(10))

    sent = sum(race([partial(publish_some, 0), partial(publish_some, 25), relay, relay]))
    sent += sum(batch.sent for batch in relay_batches())
    assert sent == 40
    assert sorted(broker.payloads) == [number for number in range(50) if number % 5]


# Relays that are killed and frozen

RELAY = """
import os, signal, sys
import django
django.setup()
from idempotency.protocol.faults import armed
from idempotency.outbox.relay import relay_batches
reached = 0
def published():
    global reached
    reached += 1
    if sys.argv[1] == "killed" and reached == 3:
        os.kill(os.getpid(), signal.SIGKILL)
def claimed():
    if sys.argv[1] == "frozen":
        print("claimed", flush=True)
        sys.stdin.readline()
armed["relay.published"] = published
armed["relay.claimed"] = claimed
print("started", flush=True)
print(sum(batch.sent for batch in relay_batches()))
"""


@pytest.fixture
def sent_file(tmp_path: Path) -> Path:
    return tmp_path / "sent"


def sent_ids(file: Path) -> Counter[str]:
    return Counter(line.partition(" ")[0] for line in file.read_text().splitlines())


def all_ids() -> set[str]:
    return {str(message_id) for message_id in OutboxMessage.objects.values_list("message_id", flat=True)}


@pytest.mark.failure_mode(53)
def test_a_relay_killed_between_publishing_and_marking_sends_again_with_the_same_ids(sent_file: Path) -> None:
    make_messages(6, sender=FILE_SENDER)
    environment = {"OUTBOX_FILE": str(sent_file)}
    killed = processes.start(RELAY, "killed", env=environment)
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert statuses() == [("pending", 1)] * 6
    assert sum(sent_ids(sent_file).values()) == 3
    output, errors = processes.start(RELAY, "run", env=environment).communicate(timeout=60)
    assert output.split() == ["started", "0"], errors  # the lease of the one that was killed runs
    make_due()
    output, errors = processes.start(RELAY, "run", env=environment).communicate(timeout=60)
    assert output.split() == ["started", "6"], errors
    assert statuses() == [("sent", 2)] * 6
    assert sent_ids(sent_file).keys() == all_ids()
    assert sorted(sent_ids(sent_file).values()) == [1, 1, 1, 2, 2, 2]


def test_a_relay_that_wakes_after_its_lease_sends_again_and_undoes_nothing(sent_file: Path) -> None:
    make_messages(4, sender=FILE_SENDER)
    environment = {"OUTBOX_FILE": str(sent_file)}
    frozen = processes.start(RELAY, "frozen", env=environment)
    assert frozen.stdout is not None
    assert [frozen.stdout.readline().strip() for _ in range(2)] == ["started", "claimed"]
    make_due()
    output, errors = processes.start(RELAY, "run", env=environment).communicate(timeout=60)
    assert output.split() == ["started", "4"], errors
    sent_at = list(OutboxMessage.objects.order_by("pk").values_list("sent_at", flat=True))
    # It sends what it had taken, finds that all of it is marked, and looks for more until there is none.
    output, errors = frozen.communicate("\n\n\n", timeout=60)
    assert output.split()[-1] == "0", errors
    assert sent_ids(sent_file) == dict.fromkeys(all_ids(), 2)
    assert statuses() == [("sent", 2)] * 4
    assert list(OutboxMessage.objects.order_by("pk").values_list("sent_at", flat=True)) == sent_at


@pytest.mark.postgres
def test_a_relay_frozen_while_it_takes_a_batch_holds_up_nobody() -> None:
    """Failure mode 9: what it has locked is passed over, and free again when the database ends its session."""
    make_messages(3)
    held = OutboxMessage.objects.order_by("pk")[:1]
    with transaction.atomic():
        assert [one.pk for one in held.select_for_update()]
        (result,) = race([relay_once])
        assert result.sent == 2
    assert relay_once().sent == 1
    assert OutboxMessage.objects.filter(status=MessageStatus.SENT).count() == 3
    assert not connection.in_atomic_block
