"""``manage.py relay_outbox``: its arguments, its report, its exit codes. The purge of messages in the other command."""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError
from django.db import connection

from idempotency.exceptions import BrokerUnavailableError
from idempotency.models import IdempotencyRecord, MessageStatus, OutboxMessage
from tests.commands import run_command
from tests.outbox import OTHER_SENDER, broker, make_due, make_messages, other_broker, statuses
from tests.records import HOUR, make_records

pytestmark = pytest.mark.django_db(transaction=True)

DAY = timedelta(days=1)
UNREACHABLE = BrokerUnavailableError("no route")


@pytest.fixture(autouse=True)
def _empty_brokers() -> None:
    broker.reset()
    other_broker.reset()


def run(command: str = "relay_outbox", **options: Any) -> tuple[int, list[str], list[str]]:
    return run_command(command, **options)


# What it does


def test_it_sends_what_is_due_and_says_so() -> None:
    make_messages(1_234)
    assert run() == (0, ["Sent 1,234 messages."], [])
    assert len(broker.deliveries) == 1_234
    assert run() == (0, ["Sent 0 messages."], [])


def test_it_tells_what_became_of_the_rest() -> None:
    make_messages(3)
    make_messages(1, payload='"dies"', attempts=15)
    make_messages(2, ordering_key="a", payload='"refused"')
    broker.refuse("dies", "refused", error=ValueError("no such queue"))
    assert run() == (0, ["Sent 3 messages, 1 to be tried again, 1 not tried, 1 dead."], [])


def test_a_broker_that_can_not_be_reached_has_an_exit_code_of_its_own() -> None:
    make_messages(2)
    make_messages(1, sender=OTHER_SENDER)
    broker.refuse(0, 1, error=UNREACHABLE)
    told = "Sender tests.outbox.broker can't reach its broker: BrokerUnavailableError: no route"
    assert run() == (5, ["Sent 1 message, 2 not tried."], [told])
    make_due()
    assert run(verbosity=0) == (5, [], [told])


def test_a_dry_run_counts_and_sends_nothing() -> None:
    assert run(dry_run=True) == (0, ["0 messages pending, of which 0 can be sent now.", "0 messages dead."], [])
    make_messages(2, due=-HOUR)
    make_messages(3, due=HOUR)
    make_messages(2, due=-HOUR, ordering_key="a")
    make_messages(1, MessageStatus.DEAD)
    code, (pending, due, dead), errors = run(dry_run=True)
    assert (code, errors) == (0, [])
    assert pending == "7 messages pending, of which 3 can be sent now."
    assert due.startswith("Due for 3,6")
    assert dead == "1 message dead."
    assert broker.deliveries == []


def test_a_verbose_run_reports_each_batch() -> None:
    make_messages(3)
    expected = ["So far: Sent 2 messages.", "So far: Sent 3 messages.", "Sent 3 messages."]
    assert run(batch_size=2, verbosity=2)[1] == expected


# The purge


def purge(**options: Any) -> tuple[int, list[str]]:
    code, lines, _ = run("purge_idempotency", **options)
    return code, lines


@pytest.fixture
def _old_rows() -> None:
    make_records(3)
    make_messages(5, MessageStatus.SENT, sent=-4 * DAY)
    make_messages(1, MessageStatus.SENT, sent=-HOUR)
    make_messages(1, MessageStatus.DEAD, due=-4 * DAY)
    make_messages(1, due=-4 * DAY)


@pytest.mark.usefixtures("_old_rows")
def test_sent_messages_are_purged_after_the_records_and_counted_by_themselves() -> None:
    assert purge(dry_run=True) == (
        0,
        ["Would purge 3 records from database 'default'.", "Would purge 5 sent messages from database 'default'."],
    )
    assert purge() == (
        0,
        ["Purged 3 records from database 'default'.", "Purged 5 sent messages from database 'default'."],
    )
    assert sorted(status for status, _ in statuses()) == ["dead", "pending", "sent"]
    assert purge() == (0, ["Purged 0 records from database 'default'."])


@pytest.mark.usefixtures("_old_rows")
def test_the_batches_of_a_purge_are_counted_for_each() -> None:
    assert purge(batch_size=2, max_batches=2) == (
        3,
        [
            "Purged 3 records from database 'default'.",
            "Purged 4 sent messages from database 'default'.",
            "Stopped by --max-batches 2. More is due.",
        ],
    )
    assert purge(batch_size=1, verbosity=2) == (
        0,
        [
            "Purged 0 records so far.",
            "Purged 0 records from database 'default'.",
            "Purged 1 sent message so far.",
            "Purged 1 sent message so far.",
            "Purged 1 sent message from database 'default'.",
        ],
    )
    assert OutboxMessage.objects.count() == 3


@pytest.mark.usefixtures("_old_rows")
def test_a_signal_ends_a_purge_before_its_messages() -> None:
    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "DELETE FROM" in sql and not calls:
            calls.append(1)
            signal.raise_signal(signal.SIGTERM)
        return execute(sql, params, many, context)

    calls: list[int] = []
    with connection.execute_wrapper(wrapper), pytest.raises(CommandError, match="Stopped by SIGTERM") as stopped:
        purge()
    assert stopped.value.returncode == 143
    assert OutboxMessage.objects.count() == 8
    assert IdempotencyRecord.objects.count() == 0
