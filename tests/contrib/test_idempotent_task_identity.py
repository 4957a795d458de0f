"""The identity that messages inherit, calls that are no deliveries, and what the log says of either."""

from __future__ import annotations

import logging

import pytest
from celery import chain
from django.db import transaction

from idempotency import claim
from idempotency.exceptions import OuterTransactionError
from idempotency.identity.scope import Scope
from idempotency.models import IdempotencyRecord
from tests.contrib.consumers import (
    FailureError,
    act,
    acts,
    effects,
    hop,
    plain,
    send,
    succeed,
)
from tests.contrib.deliveries import ACCOUNT, KEY, Inbox

# What is carried on is in headers of messages, and not in the database.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("nothing_arranged"), pytest.mark.once]


# Identity carried on


def test_a_task_that_is_published_in_an_operation_inherits_a_derived_key(inbox: Inbox) -> None:
    with claim("tests.outer", account_id="7", key="of-the-client") as run:
        for label in "ab":
            send.delay(label)
        send.apply_async(["c"], headers={KEY: "chosen", ACCOUNT: "8"})
        run.result = None
    scope = Scope("7", "tests.outer", "of-the-client")
    names = ["task:tests.send", "task:tests.send#2"]
    carried = [(message[KEY], message[ACCOUNT]) for message in inbox.messages()]
    assert carried == [*((scope.key_for(scope.derive_key(name)), "7") for name in names), ("chosen", "8")]


def test_an_operation_that_runs_again_publishes_the_same_message_again(inbox: Inbox) -> None:
    for fails in (True, False):
        try:
            with claim("tests.outer", account_id="7", key="of-the-client"):
                send.delay("a")
                if fails:
                    raise FailureError
        except FailureError:
            pass
    assert {delivered.answer for delivered in inbox.drain()} == {"acknowledged"}
    assert effects() == {"a": 1}


def test_a_chain_of_three_hops_keeps_one_trace(inbox: Inbox) -> None:
    with claim("tests.outer", account_id="7", key="of-the-client") as run:
        hop.delay(2)
        run.result = run.claim and run.claim.trace
    inbox.twice()
    assert {delivered.result for delivered in inbox.drain()} == {run.result}
    hops = IdempotencyRecord.objects.filter(operation="tests.hop")
    assert {key.partition(".")[0] for key in hops.values_list("idempotency_key", flat=True)} == {run.result}
    assert set(hops.values_list("account_id", flat=True)) == {"7"}
    assert effects() == {"hop 2": 1, "hop 1": 1, "hop 0": 1}


def test_outside_of_an_operation_nothing_is_inherited(inbox: Inbox) -> None:
    send.delay("a")
    [message] = inbox.messages()
    assert KEY not in message


def test_the_first_version_of_celerys_protocol_is_left_alone(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox.app.amqp, "create_task_message", inbox.app.amqp.as_task_v1)
    with claim("tests.outer", account_id="7", key="of-the-client") as run:
        send.delay("a")
        run.result = None
    [message] = inbox.messages()
    assert (KEY in message, message["body"]["task"]) == (False, "tests.send")


def test_a_chain_goes_on_once_when_one_of_its_messages_is_delivered_twice(inbox: Inbox) -> None:
    acts["b"] = succeed
    chain(send.si("a"), act.si("b")).apply_async()
    inbox.twice()
    inbox.drain()
    assert effects() == {"a": 1, "b": 1}


# Calls that are no deliveries


def test_a_direct_call_is_a_plain_call(inbox: Inbox) -> None:
    acts["b"] = lambda task: task.name
    acts["c"] = lambda args: send.run("c")
    assert send("a")["pair"] == (1, 2)
    assert act("b") == "tests.act"
    inbox.publish(plain, "c")  # in another task, which is running
    inbox.deliver()
    assert (effects(), IdempotencyRecord.objects.count()) == ({"a": 1, "b": 1, "c": 1}, 0)


def test_without_a_message_a_caller_with_an_open_transaction_is_told(inbox: Inbox) -> None:
    acts["a"] = lambda args: None
    inbox.publish(send, "a")
    with transaction.atomic():
        assert isinstance(inbox.deliver().result, OuterTransactionError)
    assert effects() == {}


def test_each_thing_that_happens_to_a_message_is_one_line_of_the_log(
    inbox: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "idempotency")
    key = f"{'0' * 32}.{'1' * 36}"
    message_id = inbox.publish(send, "a", headers={KEY: key})
    inbox.twice()
    inbox.drain()
    inbox.publish(send, "b", headers={KEY: key}, task_id=message_id)
    inbox.deliver()
    lines = [line.getMessage() for line in caplog.records if line.name == "idempotency"]
    begin = f"Operation 'tests.send': message {message_id[:8]}… (36 characters) to task tests.send, trace {'0' * 32}, "
    assert [line.removeprefix(begin).partition(":")[0] for line in lines] == [
        "runs as attempt 1",
        "has been consumed before, and gets the recorded result",
        "is dead-lettered to 'tests.dead'",
    ]
