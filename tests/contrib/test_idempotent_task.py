"""One message, one effect: deliveries one by one from a real broker, with failures in between."""

from datetime import timedelta
from functools import partial

import pytest
from celery.exceptions import Ignore, Reject
from django.db.models import F

from idempotency import Operation
from idempotency.contrib.celery import redrive
from idempotency.contrib.celery.deliveries import LONGEST_WAIT, longest_wait
from idempotency.contrib.celery.policy import policy_of
from idempotency.models import IdempotencyRecord
from idempotency.protocol import faults
from testproject.harness.processes import free_port
from testproject.models import Receipt
from tests.concurrency.failures import unreachable
from tests.contrib.consumers import act, auto, bare, effects, end_leases, hold, outside, parked, record, send
from tests.contrib.deliveries import ACCOUNT, DEAD, KEY, Delivered, acting, acts, dies, succeed
from tests.records import HOUR, purge_body_of

pytestmark = [pytest.mark.django_db(transaction=True)]


@pytest.mark.scenario_7
def test_a_message_delivered_twice_has_one_effect_and_one_result(inbox):
    inbox.publish(send, "a")
    inbox.twice()
    first, second = inbox.drain()
    assert first == second == Delivered("acknowledged", {"receipt": Receipt.objects.get().pk, "pair": [1, 2]})
    assert (record().status, record().attempt) == ("completed", 1)


def test_a_delivery_whose_result_is_deleted_is_acknowledged(inbox):
    message_id = inbox.publish(send, "a")
    inbox.twice()
    first = inbox.deliver()
    purge_body_of(message_id)
    assert first.answer == "acknowledged"
    second = inbox.deliver()
    assert (second.answer, type(second.result)) == ("acknowledged", Ignore)
    assert effects() == {"a": 1}


@pytest.mark.failure_53
def test_a_message_published_twice_has_one_effect(inbox):
    message_id = inbox.publish(send, "a")
    inbox.publish(send, kwargs={"amount": 2, "label": "b"}, headers={KEY: "of-the-producer"})
    inbox.publish(send, "b", 2, headers={KEY: "of-the-producer"})
    inbox.publish(send, kwargs={"label": "a"}, task_id=message_id)
    assert {delivered.answer for delivered in inbox.drain()} == {"acknowledged"}
    assert effects() == {"a": 1, "b": 1}


def test_a_message_is_claimed_under_the_account_and_key_of_its_headers(inbox):
    acts["b"] = succeed
    headers = {KEY: "key", ACCOUNT: "7"}
    message_id = inbox.publish(send, "a")
    inbox.publish(send, "a", headers=headers)
    inbox.publish(bare, "b", headers=headers)
    inbox.drain()
    assert effects() == {"a": 2, "b": 1}
    assert set(IdempotencyRecord.objects.values_list("account_id", "operation", "idempotency_key")) == {
        ("celery", "tests.send", message_id),
        ("7", "tests.send", "key"),
        ("mailer", "tests.bare", "key"),
    }


def test_a_new_parameter_with_a_default_keeps_old_fingerprints(inbox):
    arguments = policy_of(send).arguments
    assert arguments(("a",), {}, bound=False) == {"label": "a"}
    assert arguments(("a", 2), {"b": 3}, bound=False) == {"label": "a", "amount": 2, "more": {"b": 3}}
    assert policy_of(act).arguments((act, "a"), {}, bound=True) == {"label": "a"}
    with pytest.raises(TypeError, match="missing a required argument"):
        arguments((), {}, bound=False)


def test_a_duplicate_waits_for_the_first_delivery_and_gets_its_result(inbox):
    message_id = inbox.publish(send, "a", queue="celery", headers={"of": "the project"}, expires=3600)
    hold(send, message_id, label="a")
    [before] = inbox.messages()
    delivered = inbox.deliver()
    assert (delivered.answer, type(delivered.result)) == ("acknowledged", Ignore)
    [after] = inbox.messages()
    assert after["eta"] is not None
    assert after["idempotency_waited"] == 1
    same = {"id", "task", "body", "of", "retries", "expires", "root_id", "timelimit"}
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert effects() == {}

    end_leases()
    assert inbox.deliver().answer == "acknowledged"
    assert (record().status, record().attempt, effects()) == ("completed", 2, {"a": 1})


@pytest.mark.once
@pytest.mark.parametrize(
    ("waited", "pause"), [(0, 1), (3, 1), (10, 5), (3000, 30), (-1, 1), ("nonsense", 1), (True, 1), (1.5, 1)]
)
def test_pauses_grow_and_are_bounded(inbox, waited, pause):
    message_id = inbox.publish(send, "a", headers={"idempotency_waited": waited})
    hold(send, message_id, label="a")
    inbox.deliver()
    before = waited if isinstance(waited, int) and not isinstance(waited, bool) and waited > 0 else 0
    [message] = inbox.messages()
    assert message["idempotency_waited"] == before + pause


def test_a_message_waits_longer_than_any_claim_of_it_can_live(inbox):
    assert longest_wait(policy_of(send).operation) == LONGEST_WAIT == HOUR
    long = Operation.declare("tests.longest_wait", lease=timedelta(hours=2), heartbeat=timedelta(hours=3))
    assert longest_wait(long) == timedelta(hours=10)


def test_a_message_that_waited_too_long_is_dead_lettered(inbox):
    message_id = inbox.publish(send, "a", headers={"idempotency_waited": 3600, "of": "the project"})
    hold(send, message_id, label="a")
    assert inbox.deliver().answer == "acknowledged"
    assert inbox.messages() == []
    [dead] = inbox.messages(DEAD)
    assert dead["idempotency_dead_letter_reason"].startswith("waited for 3600 s: ")
    assert (dead["id"], dead["of"], "idempotency_waited" in dead) == (message_id, "the project", False)
    end_leases()
    assert redrive(DEAD) == 1
    inbox.deliver()
    assert effects() == {"a": 1}


def test_a_message_waits_for_an_unreachable_store(inbox):
    inbox.publish(send, "a")
    faults.fault_point["claim.before"] = unreachable
    assert inbox.deliver().answer == "acknowledged"
    faults.disarm()
    [message] = inbox.messages()
    assert (message["idempotency_waited"], message["idempotency_attempts"]) == (1, 0)
    inbox.deliver()
    assert effects() == {"a": 1}


def test_a_worker_that_dies_before_the_outcome_is_recorded_leaves_no_effect(inbox):
    inbox.publish(send, "a")
    faults.fault_point["complete.before"] = partial(dies, None)
    assert inbox.deliver().answer == "requeued"
    faults.disarm()
    assert (record().status, effects()) == ("in_progress", {})
    end_leases()
    assert inbox.deliver().answer == "acknowledged"
    assert (record().status, record().attempt, effects()) == ("completed", 2, {"a": 1})


def test_a_run_that_lost_its_lease_waits_and_does_not_count_as_cut_off(inbox):
    def taken_over(task):
        IdempotencyRecord.objects.update(attempt=F("attempt") + 1)  # taken over by another worker, which is running it
        return "stale"

    acting("a", taken_over, succeed)
    inbox.publish(outside, "a")
    assert inbox.deliver().answer == "acknowledged"
    [message] = inbox.messages()
    assert message["idempotency_attempts"] == 1
    end_leases()
    assert inbox.deliver() == Delivered("acknowledged", "done")
    assert (record().attempt, record().status) == (3, "completed")


def test_a_message_that_cannot_be_published_again_is_requeued(inbox, monkeypatch):
    message_id = inbox.publish(auto, "a")
    hold(auto, message_id, label="a")
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("CELERY_BROKER_URL", f"redis://127.0.0.1:{free_port()}/0")
        delivered = inbox.deliver()
    assert delivered.answer == "requeued"
    assert isinstance(delivered.result, Reject)
    [message] = inbox.messages()
    assert (message["id"], message["retries"], "idempotency_waited" in message) == (message_id, 0, False)


@pytest.mark.failure_57
@pytest.mark.parametrize(
    ("task", "answer", "error"),
    [(send, "acknowledged", Ignore), (auto, "acknowledged", Ignore), (bare, "rejected", Reject)],
    ids=["plain", "autoretry for every Exception", "without dead letters"],
)
def test_an_id_with_another_payload_is_refused_and_the_result_is_kept(inbox, task, answer, error):
    acts["a"] = succeed
    message_id = inbox.publish(task, "a")
    first = inbox.deliver()
    inbox.publish(task, "b", task_id=message_id)
    delivered = inbox.deliver()
    assert delivered.answer == answer
    assert isinstance(delivered.result, error)
    assert (effects(), inbox.messages()) == ({"a": 1}, [])
    for dead in inbox.messages(DEAD):
        assert (dead["id"], dead["task"], dead["body"][0]) == (message_id, task.name, ["b"])
        assert "different payload" in dead["idempotency_dead_letter_reason"]
    assert len(inbox.messages(DEAD)) == (answer == "acknowledged")
    inbox.publish(task, "a", task_id=message_id)
    assert inbox.deliver() == first


@pytest.mark.once
@pytest.mark.failure_40
@pytest.mark.parametrize(
    ("headers", "task_id"),
    [
        *(({KEY: wrong}, None) for wrong in ("", "k" * 256, "schlüssel", 7, None, ["a", "b"])),
        *(({ACCOUNT: wrong}, None) for wrong in ("", 7, "two\nlines")),
        ({}, "an id with spaces"),
    ],
    ids=str,
)
def test_a_malformed_identity_is_dead_lettered_without_blocking_the_queue(inbox, caplog, headers, task_id):
    inbox.publish(auto, "a", headers=headers, task_id=task_id)
    inbox.publish(send, "b")
    assert [delivered.answer for delivered in inbox.drain()] == ["acknowledged"] * 2
    assert effects() == {"b": 1}
    [dead] = inbox.messages(DEAD)
    assert (dead["task"], {name: dead[name] for name in headers}) == (auto.name, headers)
    assert "is dead-lettered" in caplog.text


@pytest.mark.failure_42
def test_arguments_without_a_canonical_form_are_dead_lettered(inbox):
    inbox.publish(send, "a", float("nan"))
    assert inbox.deliver().answer == "acknowledged"
    assert (effects(), len(inbox.messages(DEAD))) == ({}, 1)


def test_a_message_with_an_unknown_outcome_is_dead_lettered(inbox):
    acting("a", dies, succeed)
    inbox.publish(parked, "a")
    assert inbox.deliver().answer == "requeued"
    end_leases()
    assert inbox.deliver().answer == "acknowledged"
    [dead] = inbox.messages(DEAD)
    assert "not known" in dead["idempotency_dead_letter_reason"]
    assert (record().status, effects(), inbox.messages()) == ("parked", {"a": 1}, [])
