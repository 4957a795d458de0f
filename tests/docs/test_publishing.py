"""The pages about publishing and consuming: their examples work, and their numbers and tables match the code."""

import http.client
import json
import logging.config
import sys
from contextlib import nullcontext
from inspect import signature
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
from django.db import InterfaceError, OperationalError

from idempotency import log
from idempotency.contrib.celery import idempotent_task
from idempotency.contrib.celery.deliveries import LONGEST_WAIT, REASON_HEADER
from idempotency.contrib.celery.policy import policy_of
from idempotency.exceptions import BrokerUnavailableError, ReceiverBusyError
from idempotency.outbox import publish, relay
from idempotency.outbox.models import MessageStatus, OutboxMessage
from idempotency.outbox.relay import relay_once
from testproject.models import Charge, Notification, Transfer
from tests.docs.conftest import twice
from tests.docs.pages import code, section, table, text_of
from tests.factories import ChargeFactory, UserFactory
from tests.outbox import broker, make_messages

PUBLISHING = "how-to/publish-a-message.md"

# Other tests run the features of these pages on each database.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]


@pytest.fixture
def publishing(run_page):
    page = run_page(PUBLISHING)  # its part about Django's tasks defines another function ``send``
    return SimpleNamespace(**page | {"send": sys.modules["shop.webhooks"].send})


def deliveries():
    return [(topic, payload) for _, topic, payload in broker.deliveries]


def test_the_view_publishes_once_for_all_retries(publishing):
    assert [answer.status_code for answer in twice(publishing.place_order, {})] == [201, 201]
    assert relay_once().sent == 1
    assert deliveries() == [("shop.tasks.ship", {"order_id": Charge.objects.get().pk})]


def test_each_address_gets_one_message(publishing):
    publishing.tell(7, ["a@example.com", "b@example.com"])
    relay_once()
    assert deliveries() == [
        ("shop.tasks.notify", {"order_id": 7, "to": "a@example.com"}),
        ("shop.tasks.notify", {"order_id": 7, "to": "b@example.com"}),
    ]


def test_the_alarms_ring(publishing, run_page):
    outbox_alarms = run_page("how-to/monitor.md")["outbox_alarms"]
    assert not any(outbox_alarms().values())
    make_messages(1, MessageStatus.DEAD)
    make_messages(1, due=-10 * relay.LEASE)
    assert outbox_alarms() == {"no relay": True, "dead messages": True, "backlog grows": False}
    publishing.requeue_all("orders.placed", by="a test")
    assert relay_once().sent == 2


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        (204, None),
        (503, ReceiverBusyError),
        (429, ReceiverBusyError),
        (http.client.BadStatusLine(""), http.client.BadStatusLine),
        (TimeoutError(), TimeoutError),
        (404, ValueError),
        (302, ValueError),
    ],
)
def test_the_sender_distinguishes_broker_and_message_faults(publishing, monkeypatch, answer, raised):
    connect = Mock()
    retry_after = lambda name, default: "120"  # noqa: E731
    answers = [answer if isinstance(answer, Exception) else SimpleNamespace(status=answer, getheader=retry_after)]
    connect.return_value.getresponse.side_effect = answers
    monkeypatch.setattr(http.client, "HTTPSConnection", connect)
    make_messages(1, headers={"Tenant": "a", "Idempotency-Key": "another"})
    message = OutboxMessage.objects.get()
    with pytest.raises(raised) if raised else nullcontext() as failed:
        publishing.send(message)
    if raised is ReceiverBusyError:
        assert failed.value.retry_after == 120
    assert connect.call_args.kwargs["timeout"] < relay.LEASE.total_seconds() / 2
    method, path, body, headers = connect.return_value.request.call_args.args
    assert (method, path, json.loads(body)) == ("POST", "/orders.placed", 0)
    assert headers.items() >= {"Idempotency-Key": str(message.message_id), "Tenant": "a"}.items()


def test_a_receiver_without_a_connection_uses_up_no_try(publishing, monkeypatch):
    connect = Mock()
    connect.return_value.connect.side_effect = ConnectionRefusedError()
    monkeypatch.setattr(http.client, "HTTPSConnection", connect)
    make_messages(1)
    with pytest.raises(BrokerUnavailableError):
        publishing.send(OutboxMessage.objects.get())
    connect.return_value.close.assert_called_once()


def test_the_numbers_of_the_page_match_the_code():
    backoff = [min(2**attempt, relay.LONGEST_BACKOFF) for attempt in range(1, relay.MAX_ATTEMPTS)]
    assert 4.5 < sum(backoff) / 3600 < 5.5
    assert f"after {relay.MAX_ATTEMPTS} tries, some five hours" in text_of(PUBLISHING)
    assert relay.LONGEST_BACKOFF == 3600
    assert f"after {relay.UNAVAILABLE_BACKOFF.total_seconds():.0f} seconds" in text_of(PUBLISHING)
    assert f"lease of {relay.LEASE.total_seconds():.0f} seconds" in text_of("explanation/messages.md")
    assert f"{relay.DEFAULT_BATCH_SIZE} by default, up to {relay.MAX_BATCH_SIZE}" in text_of("reference/commands.md")


def test_every_argument_of_publish_is_listed():
    assert [code(row[0]) for row in table(section(PUBLISHING, "`publish`"))] == [*publish.__annotations__][:-1]


CONSUMING = "how-to/consume-a-message.md"


@pytest.fixture
def consuming(run_page):
    return SimpleNamespace(**run_page(CONSUMING))


def test_the_pages_receipt_is_sent_once(inbox, consuming):
    policy = policy_of(consuming.send_receipt)
    assert (policy.operation.name, policy.dead_letter) == ("receipts.send", "receipts.dead")
    inbox.publish(consuming.send_receipt, ChargeFactory().pk)
    inbox.twice()
    first, second = inbox.drain()
    assert first == second
    assert Notification.objects.count() == 1


def test_a_receipt_for_a_missing_charge_is_dead_lettered_and_redriven(inbox, consuming):
    one = ChargeFactory()
    number = one.pk
    one.delete()
    inbox.publish(consuming.send_receipt, number)
    inbox.drain()
    [dead] = inbox.messages("receipts.dead")
    assert dead[REASON_HEADER] == "failed: DoesNotExist"
    assert f"`{REASON_HEADER}`" in text_of(CONSUMING)
    ChargeFactory(pk=number)
    assert consuming.redrive_receipts() == 1
    inbox.drain()
    assert Notification.objects.count() == 1


def test_the_consumer_without_celery_books_once_and_rejects_a_reused_id(consuming):
    rejected = []
    account = UserFactory().pk

    def deliver(message_id, amount):
        body = json.dumps({"account": account, "amount": amount})
        return consuming.on_message(message_id, body, lambda: rejected.append(message_id))

    assert deliver("a", 5) == deliver("a", 5) == {"transfer": Transfer.objects.get().pk}
    assert deliver("a", 6) is None
    assert deliver("not a key", 5) is None
    assert (rejected, Transfer.objects.count()) == (["a", "not a key"], 1)


@pytest.mark.parametrize("error", [OperationalError, InterfaceError])
def test_the_consumers_retry_when_the_database_was_unreachable(inbox, consuming, error):
    rejected, charge = [], ChargeFactory()
    booking = ("a", json.dumps({"account": charge.account_id, "amount": 5}), lambda: rejected.append("a"))
    message_id = inbox.publish(consuming.send_receipt, charge.pk)
    with patch.object(Notification.objects, "create", side_effect=error):
        inbox.deliver()
    with patch.object(Transfer.objects, "create", side_effect=error), pytest.raises(error):
        consuming.on_message(*booking)
    assert (inbox.messages("receipts.dead"), [waiting["id"] for waiting in inbox.messages()]) == ([], [message_id])
    inbox.drain()
    assert consuming.on_message(*booking) == {"transfer": Transfer.objects.get().pk}
    assert (Notification.objects.count(), rejected) == (1, [])


def test_the_logging_configuration_is_valid(run_page):
    before = logging.getLogger().handlers[:], logging.getLogger().level
    events = logging.getLogger(log.EVENTS)
    assert events.level == logging.NOTSET
    try:
        logging.config.dictConfig(run_page("reference/signals.md")["LOGGING"])
        [handler] = logging.getLogger().handlers
        record = logging.makeLogRecord({"msg": "hello", "levelname": "INFO"})
        assert handler.filter(record)
        assert handler.format(record) == "INFO   hello"
    finally:
        events.setLevel(logging.NOTSET)
        logging.getLogger().handlers[:], logging.getLogger().level = before


def test_the_listed_arguments_of_a_task_match_the_code():
    parameters = signature(idempotent_task).parameters
    rows = table(section(CONSUMING, "Settings that matter"))
    assert {code(row[0]) for row in rows} == set(parameters) - {"operation", "policy"}
    assert f"| `max_attempts` | {parameters['max_attempts'].default} |" in text_of(CONSUMING)
    assert LONGEST_WAIT.total_seconds() == 3600
