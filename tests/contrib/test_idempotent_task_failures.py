"""Runs that are cut off, tasks that fail or use Celery's retry, ignore and reject, and the identity of messages."""

import logging
from functools import partial
from unittest.mock import Mock

import pytest
from celery import Celery, chain
from celery.exceptions import Ignore, Reject, Retry
from django.db import InterfaceError, OperationalError, transaction
from django.db.models import F

from idempotency import claim, signals
from idempotency.contrib.celery import deliveries, redrive
from idempotency.contrib.celery.deliveries import MAX_REASON_LENGTH
from idempotency.contrib.celery.messages import WAITED_HEADER
from idempotency.exceptions import BrokerUnavailableError, LeaseLostError, OuterTransactionError
from idempotency.identity.scope import Scope
from idempotency.models import IdempotencyRecord
from idempotency.protocol import faults
from testproject.harness.processes import free_port
from tests.concurrency.failures import error_of, unreachable
from tests.contrib.consumers import act, auto, bare, effects, end_leases, hop, outside, plain, record, send
from tests.contrib.deliveries import ACCOUNT, DEAD, KEY, Delivered, FailureError, acting, dies, fail, succeed
from tests.operations import receiving

# ``test_idempotent_task`` and ``tests/concurrency`` test the inbox on each database.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]


def cut_off(inbox, times):
    for _ in range(times):
        assert inbox.deliver().answer == "requeued"
        end_leases()


@pytest.mark.failure_58
@pytest.mark.parametrize(
    ("task", "answer", "dead_letters"), [(act, "acknowledged", 1), (bare, "rejected", 0)], ids=["dead letters", "none"]
)
def test_a_poison_message_releases_its_record_and_gets_new_tries(inbox, task, answer, dead_letters):
    acting("a", dies)
    message_id = inbox.publish(task, "a")
    for tries in (1, 2):
        cut_off(inbox, 2)
        assert inbox.deliver().answer == answer
        assert (record().status, effects(), inbox.messages()) == ("recoverable", {}, [])
        assert record().error == "2 runs were cut off"  # so the message is not treated as lost
        for dead in inbox.messages(DEAD):
            assert dead["idempotency_dead_letter_reason"] == "2 runs were cut off"
            assert dead["idempotency_attempts"] == 3 * tries
        assert redrive(DEAD) == dead_letters
        if not dead_letters:
            inbox.publish(task, "a", task_id=message_id)
    acting("a", succeed)
    assert inbox.deliver() == Delivered("acknowledged", "done")
    assert effects() == {"a": 1}


def taken_over():
    IdempotencyRecord.objects.update(attempt=F("attempt") + 1)


@pytest.mark.failure_58
@pytest.mark.parametrize(
    ("trouble", "attempt", "logged"),
    [(unreachable, 3, "could not be released"), (taken_over, 4, "")],
    ids=["unreachable", "taken over"],
)
def test_a_claim_that_cannot_be_released_expires(inbox, caplog, trouble, attempt, logged):
    acting("a", dies)
    inbox.publish(act, "a")
    cut_off(inbox, 2)
    faults.fault_point["release.before"] = trouble
    assert inbox.deliver().answer == "acknowledged"
    assert ("could not be released" in caplog.text, logged in caplog.text) == (bool(logged), True)
    assert (record().status, record().attempt, len(inbox.messages(DEAD))) == ("in_progress", attempt, 1)


def test_retries_of_a_task_have_one_effect_and_do_not_count_as_cut_off(inbox):
    acting("a", fail, fail, succeed)
    message_id = inbox.publish(auto, "a", headers={KEY: "key"})
    assert [type(delivered.result) for delivered in inbox.drain()] == [Retry, Retry, str]
    assert (record().attempt, record().idempotency_key, effects()) == (3, "key", {"a": 1})  # one cut-off run is allowed
    inbox.publish(auto, "a", task_id=message_id, headers={KEY: "key"})
    assert inbox.deliver() == Delivered("acknowledged", "done")
    assert effects() == {"a": 1}


@pytest.mark.failure_58
def test_a_finally_failed_task_is_dead_lettered_and_its_record_released(inbox):
    acting("a", fail)
    message_id = inbox.publish(auto, "a")
    assert [type(delivered.result) for delivered in inbox.drain()] == [Retry, Retry, FailureError]
    assert (record().status, effects()) == ("recoverable", {})
    [dead] = inbox.messages(DEAD)
    assert dead["idempotency_dead_letter_reason"] == "failed: FailureError"
    assert (dead["id"], dead["retries"], dead["idempotency_attempts"]) == (message_id, 0, 3)
    assert redrive(DEAD) == 1
    acting("a", fail, succeed)
    assert [type(delivered.result) for delivered in inbox.drain()] == [Retry, str]
    assert effects() == {"a": 1}


def raising(error):
    def act(task):
        raise error

    return act


@pytest.mark.parametrize("error", [OperationalError("shutting\ndown"), InterfaceError("already closed")], ids=repr)
@pytest.mark.parametrize("task", [act, auto, bare, outside])
def test_a_transient_database_error_delays_the_message(inbox, caplog, task, error):
    caplog.set_level(logging.INFO, "idempotency")
    acting("a", raising(error), raising(error), succeed)
    inbox.publish(task, "a")
    for _ in range(2):
        assert isinstance(inbox.deliver().result, Ignore)
        [again] = inbox.messages()
        assert (again["retries"], again["eta"] is not None) == (0, True)
    assert f"waits for 1 s: {str(error).splitlines()[0]}\n" in caplog.text
    assert inbox.deliver() == Delivered("acknowledged", "done")
    assert (record().status, record().attempt, inbox.messages(DEAD)) == ("completed", 3, [])


def test_a_task_whose_database_stays_unreachable_is_dead_lettered(inbox):
    acting("a", raising(OperationalError("shutting down")))
    inbox.publish(act, "a", headers={WAITED_HEADER: 3600})
    assert inbox.deliver().answer == "acknowledged"
    [dead] = inbox.messages(DEAD)
    assert dead["idempotency_dead_letter_reason"] == "waited for 3600 s: shutting down"


def test_a_permanent_database_error_is_a_failure(inbox, monkeypatch):
    error = error_of(monkeypatch, "42P01", "is_permanent")
    acting("a", raising(error))
    inbox.publish(act, "a")
    assert inbox.deliver().result is error
    [dead] = inbox.messages(DEAD)
    assert dead["idempotency_dead_letter_reason"] == "failed: OperationalError"


@pytest.mark.parametrize(
    ("task", "headers", "work", "reason", "attempt"),
    [
        (act, {KEY: ""}, succeed, "An idempotency key is", 0),
        (bare, {KEY: ""}, succeed, "An idempotency key is", 0),
        (outside, {KEY: "key"}, fail, "failed: FailureError", 1),
    ],
    ids=["refused", "rejected", "failed for good"],
)
def test_each_dead_letter_is_announced_with_its_reason(inbox, task, headers, work, reason, attempt):
    acting("a", work)
    message_id = inbox.publish(task, "a", headers=headers)
    with receiving(signals.dead_lettered) as received:
        inbox.deliver()
    [sent] = received
    assert (sent["sender"].name, sent["task"], sent["message_id"]) == (task.name, task.name, message_id)
    assert (reason in sent["reason"], sent["attempt"]) == (True, attempt)
    identity = ("celery", "key") if attempt else ("", "")
    assert (sent["account_id"], sent["idempotency_key"]) == identity


def test_a_waiting_or_redelivered_message_is_not_a_dead_letter(inbox, monkeypatch):
    acting("a", raising(OperationalError()))
    inbox.publish(act, "a")
    with receiving(signals.dead_lettered) as received:
        inbox.deliver()
        monkeypatch.setattr(deliveries, "publish_again", Mock(side_effect=BrokerUnavailableError))
        assert inbox.deliver().answer == "requeued"
    assert received == []


def loses_an_inner_claim(task):
    with claim("tests.inner", account_id="a", key="k") as inner:
        IdempotencyRecord.objects.filter(operation="tests.inner").update(attempt=F("attempt") + 1)
        inner.result = None


def raises_a_long_name(task):
    raise type("E" * 500, (Exception,), {})


@pytest.mark.parametrize(
    ("work", "error", "attempts", "reason"),
    [
        (None, TypeError, 0, "failed: TypeError"),
        (lambda task: object(), TypeError, 1, "failed: TypeError"),
        (loses_an_inner_claim, LeaseLostError, 1, "failed: LeaseLostError"),
        (raises_a_long_name, Exception, 1, f"failed: {'E' * (MAX_REASON_LENGTH - 8)}"),
    ],
    ids=["arguments it does not take", "a result that is not JSON", "a lost inner claim", "a long name"],
)
def test_the_reason_of_a_dead_letter_names_the_error_of_its_task(inbox, work, error, attempts, reason):
    if work is not None:
        acting("a", work)
    inbox.publish(outside, *["a"] * (work is not None))
    assert isinstance(inbox.deliver().result, error)
    [dead] = inbox.messages(DEAD)
    assert (dead["idempotency_dead_letter_reason"], dead["idempotency_attempts"]) == (reason, attempts)
    records = IdempotencyRecord.objects.filter(operation="tests.outside")
    assert [one.status for one in records] == ["recoverable"] * attempts


def test_a_task_without_dead_letters_and_a_plain_task_just_fail(inbox):
    acting("a", fail)
    inbox.publish(plain, "a")
    inbox.publish(bare, "a", retries=3)
    assert [type(delivered.result) for delivered in inbox.drain()] == [FailureError, FailureError]
    assert inbox.redis.keys("*dead*") == []


def test_self_retry_rolls_back_and_redelivers_the_same_message(inbox):
    acting("a", lambda task: task.retry(countdown=0), lambda task: task.request.retries)
    message_id = inbox.publish(act, "a")
    assert isinstance(inbox.deliver().result, Retry)
    assert (effects(), record().status) == ({}, "recoverable")
    [message] = inbox.messages()
    assert (message["id"], KEY in message) == (
        message_id,
        False,
    )  # not a derived key
    assert inbox.deliver() == Delivered("acknowledged", 1)
    assert (effects(), record().idempotency_key) == ({"a": 1}, message_id)


@pytest.mark.parametrize(("error", "answer"), [(Ignore, "acknowledged"), (Reject, "rejected")])
def test_an_ignored_or_rejected_message_is_rolled_back_not_dead_lettered(inbox, error, answer):
    acting("a", Mock(side_effect=error))
    inbox.publish(act, "a")
    delivered = inbox.deliver()
    assert (delivered.answer, type(delivered.result)) == (answer, error)
    assert (effects(), record().status, inbox.messages(DEAD)) == ({}, "recoverable", [])


def test_dead_letters_are_redriven_oldest_first_up_to_the_limit(inbox):
    acting("a", fail)
    headers = {KEY: "key", "of": "the project"}
    ids = [inbox.publish(act, "a", headers=headers, expires=3600) for _ in range(3)]
    inbox.drain()
    before = inbox.messages(DEAD)
    assert redrive(DEAD, limit=2) == 2
    assert [message["id"] for message in inbox.messages()] == ids[:2]
    [message, _] = inbox.messages()
    assert message == {name: value for name, value in before[0].items() if name != "idempotency_dead_letter_reason"}
    assert (redrive(DEAD), redrive(DEAD)) == (1, 0)
    acting("a", succeed)
    assert {delivered.result for delivered in inbox.drain()} == {"done"}
    assert effects() == {"a": 1}


def test_a_dead_letter_is_redriven_to_the_current_queue_of_its_task(inbox):
    acting("a", fail)
    inbox.publish(act, "a")
    inbox.drain()
    app = Celery("tests.routed", set_as_current=False)
    app.conf.task_routes = {act.name: {"queue": "receipts"}}
    assert redrive(DEAD, app=app) == 1
    assert (len(inbox.messages()), len(inbox.messages("receipts"))) == (0, 1)


def test_redrive_raises_an_error_if_the_broker_is_unreachable(monkeypatch):
    monkeypatch.setenv("CELERY_BROKER_URL", f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(BrokerUnavailableError):
        redrive(DEAD)


def test_a_task_published_in_an_operation_inherits_a_derived_key(inbox):
    with claim("tests.outer", account_id="7", key="of-the-client") as run:
        for label in "ab":
            send.delay(label)
        send.apply_async(["c"], headers={KEY: "chosen", ACCOUNT: "8"})
        transaction.on_commit(partial(send.delay, "d"))
        run.result = None
    scope = Scope("7", "tests.outer", "of-the-client")
    *inherited, after_commit = [
        (scope.key_for(scope.derive_key(f"task:tests.send{nth}")), "7") for nth in ("", "#2", "#3")
    ]
    carried = [(message[KEY], message[ACCOUNT]) for message in inbox.messages()]
    assert carried == [*inherited, ("chosen", "8"), after_commit]


def test_a_chain_of_three_hops_keeps_one_trace(inbox):
    with claim("tests.outer", account_id="7", key="of-the-client") as run:
        hop.delay(2)
        run.result = run.claim.trace
    inbox.twice()
    assert {delivered.result for delivered in inbox.drain()} == {run.result}
    hops = IdempotencyRecord.objects.filter(operation="tests.hop")
    assert {key.partition(".")[0] for key in hops.values_list("idempotency_key", flat=True)} == {run.result}
    assert set(hops.values_list("account_id", flat=True)) == {"7"}
    assert effects() == {"hop 2": 1, "hop 1": 1, "hop 0": 1}


def test_messages_of_celerys_protocol_version_1_are_left_unchanged(inbox, monkeypatch):
    monkeypatch.setattr(inbox.app.amqp, "create_task_message", inbox.app.amqp.as_task_v1)
    with claim("tests.outer", account_id="7", key="of-the-client") as run:
        send.delay("a")
        run.result = None
    [message] = inbox.messages()
    assert (KEY in message, message["body"]["task"]) == (False, "tests.send")


def test_a_chain_continues_once_if_one_of_its_messages_is_delivered_twice(inbox):
    acting("b", succeed)
    chain(send.si("a"), act.si("b")).apply_async()
    inbox.twice()
    inbox.drain()
    assert effects() == {"a": 1, "b": 1}


def test_a_direct_call_is_a_plain_call(inbox):
    acting("b", lambda task: task.name)
    acting("c", lambda args: send.run("c"))
    assert send("a")["pair"] == (1, 2)
    assert act("b") == "tests.act"
    inbox.publish(plain, "c")  # called from another running task
    inbox.deliver()
    assert (effects(), IdempotencyRecord.objects.count()) == ({"a": 1, "b": 1, "c": 1}, 0)


def test_a_delivery_within_an_open_transaction_gets_an_error(inbox):
    acting("a", lambda args: None)
    inbox.publish(send, "a")
    with transaction.atomic():
        assert isinstance(inbox.deliver().result, OuterTransactionError)
    assert effects() == {}


def test_each_event_of_a_message_is_one_log_line(inbox, caplog):
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
