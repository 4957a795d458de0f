"""The outbox's Celery sender: its messages on a real broker, and its errors without a broker."""

import itertools
import logging

import pytest
from amqp.exceptions import AccessRefused, NotAllowed
from celery.signals import import_modules
from django.db import transaction

from idempotency import claim
from idempotency.contrib import celery as contrib
from idempotency.contrib.celery import CelerySender, publishing
from idempotency.exceptions import BrokerUnavailableError
from idempotency.models import IdempotencyRecord
from idempotency.outbox import publish
from idempotency.outbox.models import MessageStatus, OutboxMessage
from testproject.celery import app
from testproject.harness.processes import free_port
from testproject.models import Receipt
from tests.contrib.consumers import effects, send

# The sender uses only a broker. The outbox is tested on each database in ``tests/database``.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]

#: The most seconds that a publisher may wait in total between its tries, for a broker that refuses connections.
SOON = 1.0


@pytest.fixture(autouse=True)
def fresh_sender(monkeypatch):
    """A sender that has not yet detected an unreachable broker."""
    sender = CelerySender()
    monkeypatch.setattr(contrib, "send", sender)
    return sender


def message(payload='{"label": "a"}', **fields):
    with transaction.atomic():
        written = publish(send.name, None)
    for name, value in {"payload": payload, **fields}.items():
        setattr(written, name, value)
    return written


@pytest.mark.parametrize(
    ("payload", "body"),
    [('{"label": "a"}', [[], {"label": "a"}]), ('["a", 2]', [["a", 2], {}]), ("[]", None), ("null", None)],
)
def test_a_message_calls_the_task_of_its_topic_under_its_id_and_key(inbox, payload, body):
    one = message(payload, topic="elsewhere.task" if body is None else send.name, account_id="7", headers={"of": "us"})
    inbox.redis.flushall()  # removes the nudge
    contrib.send(one)
    [found] = inbox.messages()
    assert (found["task"], found["id"]) == (one.topic, str(one.message_id))
    assert found["body"][:2] == (body or [[], {}])
    names = ("idempotency_key", "idempotency_account", "of")
    assert [found[name] for name in names] == [one.idempotency_key, "7", "us"]
    contrib.send(message(headers={"idempotency_key": "chosen"}))
    without_account = inbox.messages()[-1]
    assert (without_account["idempotency_key"], "idempotency_account" in without_account) == ("chosen", False)


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        *itertools.product(["7", '"text"', "true"], [r"must be an object .*, an array .* or null"]),
        ('{"amount": 1}', "label"),  # the task takes no such arguments
    ],
)
def test_a_payload_that_does_not_fit_the_task_is_a_type_error(inbox, payload, error):
    with pytest.raises(TypeError, match=error):
        contrib.send(message(payload))


@pytest.mark.parametrize("scheme", ["redis", "amqp"])
def test_an_unreachable_broker_soon_raises_an_error(monkeypatch, scheme):
    monkeypatch.setenv("CELERY_BROKER_URL", f"{scheme}://127.0.0.1:{free_port()}//")
    pauses = []
    monkeypatch.setattr("kombu.utils.functional.sleep", pauses.append)
    with pytest.raises(BrokerUnavailableError, match="can't be reached"):
        contrib.send(message())
    assert 0 < sum(pauses) < SOON


def test_rabbitmq_confirms_and_redis_has_timeouts(monkeypatch):
    options = {}
    for scheme in ("redis", "amqp", "memory"):
        monkeypatch.setenv("CELERY_BROKER_URL", f"{scheme}://127.0.0.1:{free_port()}//")
        with publishing.confirming_producer(app) as producer:
            options[scheme] = producer.connection.transport_options
    assert options["amqp"]["confirm_publish"] is True
    assert options["redis"]["socket_timeout"] == publishing.CONFIRM_TIMEOUT
    assert {name for name in options["memory"] if name.startswith("socket")} == set()
    assert all(each["max_retries"] == 1 for each in options.values())


def test_a_forked_process_does_not_use_its_parents_connections(inbox, monkeypatch):
    found = []
    for pid in (1, 1, 2):
        with monkeypatch.context() as forked:
            forked.setattr(publishing.os, "getpid", lambda pid=pid: pid)
            with publishing.confirming_producer(app) as producer:
                found.append(producer)
    assert found[0] is found[1]
    assert found[0] is not found[2]


def test_a_commit_nudges_a_worker_to_relay_and_a_rollback_does_not(inbox):
    with transaction.atomic():
        publish(send.name, ["a"])
        transaction.set_rollback(True)
    assert inbox.messages() == []
    with transaction.atomic():
        publish(send.name, ["a"])
    [nudge] = inbox.messages()
    assert nudge["task"] == "idempotency.contrib.celery.tasks.relay_outbox"
    assert (nudge["expires"] is not None, nudge["ignore_result"]) == (True, True)


def test_only_the_first_commit_waits_for_an_unreachable_broker(monkeypatch, caplog, fresh_sender):
    monkeypatch.setenv("CELERY_BROKER_URL", f"redis://127.0.0.1:{free_port()}/0")
    for label in "ab":
        with transaction.atomic():
            publish(send.name, [label])
    warnings = [line for line in caplog.records if line.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "No worker could be nudged to relay the outbox" in warnings[0].getMessage()
    assert OutboxMessage.objects.filter(status=MessageStatus.PENDING).count() == 2
    monkeypatch.setattr(fresh_sender, "_quiet_until", 0.0)  # the quiet time is over
    fresh_sender.nudge()
    assert len([line for line in caplog.records if line.levelno == logging.WARNING]) == 2


def test_a_committed_message_is_relayed_and_takes_effect_once(inbox):
    with claim("tests.outer", account_id="7", key="key") as run:
        publish(send.name, {"label": "a"})
        run.result = run.claim.trace
    inbox.drain()  # the nudged relay, then its message
    sent = OutboxMessage.objects.get()
    consumed = IdempotencyRecord.objects.get(operation="tests.send")
    assert (sent.status, effects()) == (MessageStatus.SENT, {"a": 1})
    assert (consumed.account_id, consumed.idempotency_key) == ("7", sent.idempotency_key)
    assert consumed.scope.trace == run.result


@pytest.mark.usefixtures("eager")
def test_with_eager_tasks_the_effect_follows_the_commit():
    with transaction.atomic():
        publish(send.name, ["a"])
        assert not Receipt.objects.exists()
    assert effects() == {"a": 1}


@pytest.mark.usefixtures("eager")
def test_an_eager_task_is_imported_as_by_a_worker():
    ran = []

    def note(label):
        ran.append(label)

    def discover(**kwargs):
        app.task(note, name="tests.discovered")

    import_modules.connect(discover)
    try:
        with transaction.atomic():
            publish("tests.discovered", ["a"])
    finally:
        import_modules.disconnect(discover)
        app.tasks.pop("tests.discovered", None)
    assert ran == ["a"]


@pytest.mark.usefixtures("eager")
def test_a_message_to_an_undeclared_eager_task_does_not_count_as_sent():
    with transaction.atomic():
        written = publish("tests.undeclared", ["a"])
    written.refresh_from_db()
    assert written.status == MessageStatus.PENDING
    assert "tests.undeclared" in written.error


@pytest.mark.parametrize("refusal", [AccessRefused, NotAllowed])
def test_a_broker_that_refuses_the_user_does_not_count_against_the_message(inbox, refusal):
    with pytest.raises(BrokerUnavailableError, match="can't be reached"), publishing.confirming_producer(inbox.app):
        raise refusal("ACCESS_REFUSED - Login was refused")
