"""Runs that are cut off, tasks that fail, and Celery's own ways out: what is left, and where the message goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry
from django.db import OperationalError
from django.db.models import F

from idempotency import claim
from idempotency.contrib.celery import redrive
from idempotency.contrib.celery.deliveries import MAX_REASON_LENGTH
from idempotency.exceptions import BrokerUnavailableError, LeaseLostError
from idempotency.models import IdempotencyRecord
from idempotency.protocol import faults
from testproject.harness.processes import free_port
from tests.contrib import consumers
from tests.contrib.consumers import (
    FailureError,
    act,
    acting,
    acts,
    auto,
    bare,
    dies,
    effects,
    end_leases,
    outside,
    plain,
    record,
    send,
    succeed,
)
from tests.contrib.deliveries import DEAD, KEY, Delivered, Inbox

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("nothing_arranged")]


# Runs that are cut off


@pytest.mark.failure_mode(53)
def test_a_run_that_was_cut_off_is_delivered_again_and_has_one_effect(inbox: Inbox) -> None:
    acting("a", dies, succeed)
    inbox.publish(act, "a")
    assert inbox.deliver().answer == "requeued"
    assert (record().status, effects()) == ("in_progress", {})
    inbox.deliver()  # its lease runs
    end_leases()
    assert inbox.drain() == [Delivered("acknowledged", "done")]
    assert (record().status, effects()) == ("completed", {"a": 1})


def cut_off(inbox: Inbox, times: int) -> None:
    for _ in range(times):
        assert inbox.deliver().answer == "requeued"
        end_leases()


@pytest.mark.failure_mode(58)
def test_a_poison_message_is_dead_lettered_its_record_is_free_and_it_gets_as_many_tries_again(inbox: Inbox) -> None:
    acting("a", dies)
    inbox.publish(act, "a")
    for tries in (1, 2):
        cut_off(inbox, 2)
        assert inbox.deliver().answer == "acknowledged"
        assert record().status == "recoverable"
        [dead] = inbox.messages(DEAD)
        assert dead["idempotency_dead_letter_reason"] == "2 runs were cut off"
        assert (dead["idempotency_attempts"], effects(), inbox.messages()) == (3 * tries, {}, [])
        assert redrive(DEAD) == 1
    acts["a"] = succeed
    assert inbox.deliver() == Delivered("acknowledged", "done")
    assert effects() == {"a": 1}


@pytest.mark.failure_mode(58)
def test_without_dead_letters_a_poison_message_is_rejected_and_gets_as_many_tries_again(inbox: Inbox) -> None:
    acting("a", dies)
    message_id = inbox.publish(bare, "a")
    for _ in range(2):
        cut_off(inbox, 2)
        assert inbox.deliver().answer == "rejected"
        assert record().status == "recoverable"
        inbox.publish(bare, "a", task_id=message_id)


@pytest.mark.failure_mode(58)
def test_a_claim_that_cannot_be_given_back_runs_out_by_itself(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    def unreachable() -> None:
        raise OperationalError("the database has gone")

    acting("a", dies)
    inbox.publish(act, "a")
    cut_off(inbox, 2)
    faults.armed["release.before"] = unreachable
    assert inbox.deliver().answer == "acknowledged"
    assert "could not be released" in caplog.text
    assert (record().status, len(inbox.messages(DEAD))) == ("in_progress", 1)


def test_a_claim_that_is_no_longer_there_to_give_back_is_left_alone(inbox: Inbox) -> None:
    def taken_over() -> None:
        IdempotencyRecord.objects.update(attempt=F("attempt") + 1)

    acting("a", dies)
    inbox.publish(act, "a")
    cut_off(inbox, 2)
    faults.armed["release.before"] = taken_over
    assert inbox.deliver().answer == "acknowledged"
    assert (record().status, record().attempt) == ("in_progress", 4)


def test_the_tasks_own_retries_are_not_taken_for_runs_that_were_cut_off(inbox: Inbox) -> None:
    acting("a", fail := consumers.fail, fail, succeed)
    inbox.publish(auto, "a")
    assert [type(delivered.result) for delivered in inbox.drain()] == [Retry, Retry, str]
    assert (record().attempt, effects()) == (3, {"a": 1})  # and cut off it may be once


# Failures, and Celery's own ways out


def test_autoretry_runs_again_and_leaves_one_effect(inbox: Inbox) -> None:
    acting("a", consumers.fail, succeed)
    message_id = inbox.publish(auto, "a", headers={KEY: "key"})
    assert [type(delivered.result) for delivered in inbox.drain()] == [Retry, str]
    assert (effects(), record().idempotency_key) == ({"a": 1}, "key")
    inbox.publish(auto, "a", task_id=message_id, headers={KEY: "key"})
    assert inbox.deliver() == Delivered("acknowledged", "done")
    assert effects() == {"a": 1}


@pytest.mark.failure_mode(58)
def test_a_task_that_fails_for_good_is_dead_lettered_with_fresh_retries_and_its_record_is_free(inbox: Inbox) -> None:
    acting("a", consumers.fail)
    message_id = inbox.publish(auto, "a")
    assert [type(delivered.result) for delivered in inbox.drain()] == [Retry, Retry, FailureError]
    assert (record().status, effects()) == ("recoverable", {})
    [dead] = inbox.messages(DEAD)
    assert dead["idempotency_dead_letter_reason"] == "failed: FailureError"
    assert (dead["id"], dead["retries"], dead["idempotency_attempts"]) == (message_id, 0, 3)
    assert redrive(DEAD) == 1
    acting("a", consumers.fail, succeed)
    assert [type(delivered.result) for delivered in inbox.drain()] == [Retry, str]
    assert effects() == {"a": 1}


def test_a_task_without_dead_letters_and_a_plain_one_just_fail(inbox: Inbox) -> None:
    acts["a"] = consumers.fail
    inbox.publish(plain, "a")
    inbox.publish(bare, "a", retries=3)
    assert [type(delivered.result) for delivered in inbox.drain()] == [FailureError, FailureError]
    assert inbox.redis.keys("*dead*") == []


def test_a_lease_that_a_claim_within_the_task_lost_is_a_failure_like_any_other(inbox: Inbox) -> None:
    def loses_its_claim(task: Any) -> None:
        with claim("tests.inner", account_id="a", key="k") as inner:
            IdempotencyRecord.objects.filter(operation="tests.inner").update(attempt=F("attempt") + 1)
            inner.result = None

    acts["a"] = loses_its_claim
    inbox.publish(outside, "a")
    assert isinstance(inbox.deliver().result, LeaseLostError)
    [dead] = inbox.messages(DEAD)
    assert dead["idempotency_dead_letter_reason"] == "failed: LeaseLostError"
    assert IdempotencyRecord.objects.get(operation="tests.outside").status == "recoverable"


def test_arguments_that_the_task_does_not_take_are_a_failure(inbox: Inbox) -> None:
    inbox.publish(send)
    assert isinstance(inbox.deliver().result, TypeError)
    [dead] = inbox.messages(DEAD)
    assert (dead["idempotency_dead_letter_reason"], dead["idempotency_attempts"]) == ("failed: TypeError", 0)


def test_a_result_that_is_not_json_is_a_failure_and_nothing_is_kept(inbox: Inbox) -> None:
    acts["a"] = lambda task: object()
    inbox.publish(act, "a")
    assert isinstance(inbox.deliver().result, TypeError)
    assert (effects(), record().status) == ({}, "recoverable")


def test_self_retry_rolls_back_and_comes_again_as_the_same_message(inbox: Inbox) -> None:
    acting("a", lambda task: task.retry(countdown=0), lambda task: task.request.retries)
    message_id = inbox.publish(act, "a")
    assert isinstance(inbox.deliver().result, Retry)
    assert (effects(), record().status) == ({}, "recoverable")
    [message] = inbox.messages()
    assert (message["id"], KEY in message) == (message_id, False)  # published under the claim, and not derived from it
    assert inbox.deliver() == Delivered("acknowledged", 1)
    assert (effects(), record().idempotency_key) == ({"a": 1}, message_id)


@pytest.mark.parametrize(
    ("raised", "error", "answer"),
    [(consumers.ignore, Ignore, "acknowledged"), (consumers.reject, Reject, "rejected")],
    ids=["Ignore", "Reject"],
)
def test_what_a_task_ignores_or_rejects_is_rolled_back_and_not_dead_lettered(
    inbox: Inbox, raised: Callable[[Any], Any], error: type[Exception], answer: str
) -> None:
    acts["a"] = raised
    inbox.publish(act, "a")
    delivered = inbox.deliver()
    assert (delivered.answer, type(delivered.result)) == (answer, error)
    assert (effects(), record().status, inbox.messages(DEAD)) == ({}, "recoverable", [])


def test_a_long_reason_is_cut(inbox: Inbox) -> None:
    acts["a"] = lambda task: exec(f"class {'E' * 500}(Exception): ...\nraise {'E' * 500}")
    inbox.publish(act, "a")
    inbox.deliver()
    [dead] = inbox.messages(DEAD)
    assert len(dead["idempotency_dead_letter_reason"]) == MAX_REASON_LENGTH


# Dead letters are redriven


def test_dead_letters_are_redriven_the_oldest_first_and_as_many_as_asked_for(inbox: Inbox) -> None:
    acts["a"] = consumers.fail
    headers = {KEY: "key", "of": "the project"}
    ids = [inbox.publish(act, "a", headers=headers, expires=3600) for _ in range(3)]
    inbox.drain()
    before = inbox.messages(DEAD)
    assert redrive(DEAD, limit=2) == 2
    assert [message["id"] for message in inbox.messages()] == ids[:2]
    [message, _] = inbox.messages()
    assert message == {name: value for name, value in before[0].items() if name != "idempotency_dead_letter_reason"}
    assert (redrive(DEAD), redrive(DEAD)) == (1, 0)
    acts["a"] = succeed
    assert {delivered.result for delivered in inbox.drain()} == {"done"}
    assert effects() == {"a": 1}


def test_a_dead_letter_goes_to_where_its_task_is_routed_now(inbox: Inbox) -> None:
    acts["a"] = consumers.fail
    inbox.publish(act, "a")
    inbox.drain()
    app = Celery("tests.routed", set_as_current=False)
    app.conf.task_routes = {act.name: {"queue": "receipts"}}
    assert redrive(DEAD, app=app) == 1
    assert (len(inbox.messages()), len(inbox.messages("receipts"))) == (0, 1)


def test_a_broker_that_cannot_be_reached_brings_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(BrokerUnavailableError):
        redrive(DEAD)
