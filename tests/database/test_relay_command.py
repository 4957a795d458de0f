"""``manage.py relay_outbox``: its report, and its exit codes."""

from __future__ import annotations

from typing import Any

import pytest

from idempotency.exceptions import BrokerUnavailableError
from idempotency.models import MessageStatus
from tests.commands import run_command
from tests.outbox import OTHER_SENDER, broker, make_due, make_messages
from tests.records import HOUR

pytestmark = pytest.mark.django_db(transaction=True)

UNREACHABLE = BrokerUnavailableError("no route")


def run(**options: Any) -> tuple[int, list[str], list[str]]:
    return run_command("relay_outbox", **options)


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
