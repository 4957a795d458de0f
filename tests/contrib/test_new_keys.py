"""A client that sends a retry under a new key is reported, and is never refused."""

from datetime import timedelta

import pytest
from django.core.cache import cache

from idempotency import claim, signals
from idempotency.contrib.new_keys import new_key_for_same_payload, report_new_keys

pytestmark = [pytest.mark.django_db, pytest.mark.once]


@pytest.fixture
def reported():
    told = []

    def note(sender, account_id, idempotency_key, **more):
        told.append((sender.name, account_id, idempotency_key))

    cache.clear()
    new_key_for_same_payload.connect(note)
    report_new_keys(timedelta(minutes=5))
    yield told
    signals.claimed.disconnect(dispatch_uid="idempotency.contrib.new_keys")
    new_key_for_same_payload.disconnect(note)


def run(key, payload=1, *, account_id="a", operation="tests.pay"):
    with claim(operation, account_id=account_id, key=key, payload=payload) as block:
        block.result = None


def test_the_same_payload_under_another_key_is_reported(reported, caplog):
    run("first-key")
    run("second-key")
    run("third-key")
    assert reported == [("tests.pay", "a", "second-key"), ("tests.pay", "a", "third-key")]
    assert "'tests.pay': the same payload came under a new key, secon… (10 characters)" in caplog.text


def test_a_retry_and_other_operations_are_not(reported):
    run("k")
    run("k")
    run("l", payload=2)
    run("m", account_id="b")
    run("n", operation="tests.refund")
    with pytest.raises(ZeroDivisionError), claim("tests.pay", account_id="a", key="o", payload=3):
        _ = 1 / 0
    run("o", payload=3)
    assert reported == []


def test_a_payload_that_comes_after_the_window_is_not(reported):
    run("k")
    cache.clear()
    run("l")
    assert reported == []
