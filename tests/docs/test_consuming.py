"""The page about consuming does what it says."""

from __future__ import annotations

import json
import logging.config
from inspect import signature
from typing import Any

import pytest

from idempotency.contrib.celery import idempotent_task
from idempotency.contrib.celery.deliveries import PATIENCE, REASON_HEADER
from idempotency.contrib.celery.policy import policy_of
from testproject.models import Charge, Notification, Transfer
from tests.contrib.deliveries import Inbox
from tests.docs.conftest import RunPage
from tests.docs.pages import code, section, table, text_of
from tests.factories import UserFactory

PAGE = "how-to/consume-a-message.md"
TEXT = text_of(PAGE)

# What the page shows is tested on each database elsewhere.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]


@pytest.fixture
def page(run_page: RunPage) -> dict[str, Any]:
    return run_page(PAGE)


def charge() -> Charge:
    made: Charge = Charge.objects.create(account=UserFactory(), amount=5, currency="usd")
    return made


def test_the_receipt_is_sent_once(inbox: Inbox, page: dict[str, Any]) -> None:
    inbox.publish(page["send_receipt"], charge().pk)
    inbox.twice()
    first, second = inbox.drain()
    assert first == second
    assert Notification.objects.count() == 1


def test_a_receipt_of_nothing_is_dead_lettered_and_redriven(inbox: Inbox, page: dict[str, Any]) -> None:
    one = charge()
    number = one.pk
    one.delete()
    inbox.publish(page["send_receipt"], number)
    inbox.drain()
    [dead] = inbox.messages("receipts.dead")
    assert dead[REASON_HEADER] == "failed: DoesNotExist"
    assert f"`{REASON_HEADER}`" in TEXT
    Charge(pk=number, account=UserFactory(), amount=5, currency="usd").save()
    assert page["redrive_receipts"]() == 1
    inbox.drain()
    assert Notification.objects.count() == 1


def test_the_consumer_without_celery_books_once_and_rejects_what_is_reused(page: dict[str, Any]) -> None:
    rejected: list[str] = []
    account = UserFactory().pk

    def deliver(message_id: str, amount: int) -> Any:
        body = json.dumps({"account": account, "amount": amount})
        return page["on_message"](message_id, body, lambda: rejected.append(message_id))

    assert deliver("a", 5) == deliver("a", 5) == {"transfer": Transfer.objects.get().pk}
    assert deliver("a", 6) is None
    assert deliver("not a key", 5) is None
    assert (rejected, Transfer.objects.count()) == (["a", "not a key"], 1)


def test_the_logging_is_as_django_takes_it(page: dict[str, Any]) -> None:
    before = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        logging.config.dictConfig(page["LOGGING"])
        [handler] = logging.getLogger().handlers
        record = logging.makeLogRecord({"msg": "hello", "levelname": "INFO"})
        assert handler.filter(record)
        assert handler.format(record) == "INFO   hello"
    finally:
        logging.getLogger().handlers[:], logging.getLogger().level = before


def test_the_arguments_are_those_that_there_are() -> None:
    parameters = signature(idempotent_task).parameters
    rows = table(section(PAGE, "Settings that matter"))
    assert {code(row[0]) for row in rows} == set(parameters) - {"operation", "policy"}
    assert f"| `max_attempts` | {parameters['max_attempts'].default} |" in TEXT
    assert PATIENCE.total_seconds() == 3600


def test_the_policy_is_the_tasks(page: dict[str, Any]) -> None:
    policy = policy_of(page["send_receipt"])
    assert policy is not None
    assert (policy.operation.name, policy.dead_letter) == ("receipts.send", "receipts.dead")
