"""Whose key it is, for which payload and how long; well-formed and malformed keys; what passes through."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import call_command
from django.utils import timezone
from rest_framework.decorators import api_view

from idempotency import idempotent
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.http.callers import Caller, Serve, claim_anew, effects, problem_code
from tests.http.views import drf_answer, plain_answer
from tests.records import HOUR, expire, from_now

pytestmark = pytest.mark.django_db(transaction=True)


# 2, 5, 6: whose key it is, for which payload, for how long


@pytest.mark.scenario(2)
def test_another_payload_is_rejected_and_the_first_answer_is_not_shown(
    alice: Caller, serve_operation: Callable[..., None]
) -> None:
    serve_operation()
    first = alice.post(data={"amount": 1}, key="k")
    assert first.status_code == 201
    refused = alice.post(data={"amount": 2}, key="k")
    assert refused.status_code == 422
    assert problem_code(refused) == "idempotency_key_reused"
    assert "Retry-After" not in refused
    assert "Idempotency-Replayed" not in refused
    assert "Location" not in refused
    assert effects() == 1
    # What was refused has changed nothing: the first payload still replays.
    assert alice.post(data={"amount": 1}, key="k").content == first.content
    assert effects() == 1


@pytest.mark.scenario(5)
@pytest.mark.parametrize("purged", [False, True], ids=["not purged", "purged"])
@pytest.mark.parametrize("payload", [{"amount": 1}, {"amount": 2}], ids=["same payload", "other payload"])
def test_a_retry_after_the_retention_is_a_new_request(
    alice: Caller, serve_operation: Callable[..., None], purged: bool, payload: Any
) -> None:
    serve_operation()
    first = alice.post(data={"amount": 1}, key="k")
    record = IdempotencyRecord.objects.get()
    expire(record.pk)
    IdempotencyRecord.objects.update(created_at=from_now(-HOUR * 73))
    if purged:
        call_command("purge_idempotency", verbosity=0)
        assert not IdempotencyRecord.objects.exists()
    second = alice.post(data=payload, key="k")
    assert second.status_code == 201
    assert "Idempotency-Replayed" not in second
    assert second.content != first.content
    assert effects() == 2
    renewed = IdempotencyRecord.objects.get()
    assert renewed.status == Status.COMPLETED
    assert renewed.expires_at - renewed.completed_at == timedelta(days=3)
    assert abs(renewed.created_at - timezone.now()) < timedelta(minutes=5)
    # The new request has a retention of its own.
    replay = alice.post(data=payload, key="k")
    assert replay.content == second.content
    assert replay["Idempotency-Replayed"] == "true"
    assert effects() == 2


@pytest.mark.scenario(5)
def test_a_recoverable_record_past_its_retention_takes_another_payload(
    alice: Caller, serve_operation: Callable[..., None]
) -> None:
    serve_operation()
    assert alice.post("/?status=503", {"amount": 1}, key="k").status_code == 503
    assert IdempotencyRecord.objects.get().status == Status.RECOVERABLE
    assert alice.post(data={"amount": 2}, key="k").status_code == 422
    expire(IdempotencyRecord.objects.get().pk)
    assert alice.post(data={"amount": 2}, key="k").status_code == 201
    assert effects() == 1


@pytest.mark.scenario(5)
def test_a_live_claim_past_its_retention_is_still_in_progress(
    alice: Caller, serve_operation: Callable[..., None]
) -> None:
    serve_operation()
    alice.post(data={}, key="k")
    claim_anew()
    IdempotencyRecord.objects.update(expires_at=from_now(-HOUR))
    assert problem_code(alice.post(data={}, key="k")) == "idempotency_in_progress"
    assert effects() == 1


@pytest.mark.scenario(5)
def test_the_operations_own_ttl_decides(alice: Caller, serve: Serve, settings: Any) -> None:
    settings.IDEMPOTENCY = {"TTL": timedelta(hours=2)}
    serve(
        idempotent("tests.default")(plain_answer),
        **{"own/": idempotent("tests.own", ttl=timedelta(hours=5))(plain_answer)},
    )
    alice.post(key="k")
    alice.post("/own/", key="k")
    retention = {
        record.operation: record.expires_at - record.completed_at for record in IdempotencyRecord.objects.all()
    }
    assert retention == {"tests.default": timedelta(hours=2), "tests.own": timedelta(hours=5)}


@pytest.mark.scenario(6)
def test_two_accounts_with_one_key_are_two_requests(
    alice: Caller, bob: Caller, serve_operation: Callable[..., None]
) -> None:
    serve_operation()
    of_alice = alice.post(data={"amount": 1}, key="k")
    of_bob = bob.post(data={"amount": 1}, key="k")
    assert of_bob.status_code == 201
    assert "Idempotency-Replayed" not in of_bob
    assert of_alice.content != of_bob.content
    assert alice.post(data={"amount": 1}, key="k").content == of_alice.content
    assert bob.post(data={"amount": 1}, key="k").content == of_bob.content
    # Another payload of the other's is nobody's reuse.
    assert bob.post(data={"amount": 2}, key="k2").status_code == 201
    assert alice.post(data={"amount": 3}, key="k2").status_code == 201
    assert effects() == 4
    assert IdempotencyRecord.objects.count() == 4
    for caller, count in ((alice, 2), (bob, 2)):
        assert caller.user is not None
        assert Transfer.objects.filter(account=caller.user).count() == count
        assert IdempotencyRecord.objects.filter(account_id=str(caller.user.pk)).count() == count


# 8-11: run, replay, no key, bad keys, other methods


@pytest.mark.scenario(9)
def test_different_keys_both_run(alice: Caller, serve_operation: Callable[..., None]) -> None:
    serve_operation()
    assert alice.post(key="one").status_code == 201
    assert alice.post(key="two").status_code == 201
    assert effects() == 2
    assert IdempotencyRecord.objects.count() == 2


@pytest.mark.scenario(9)
def test_keys_differ_by_case(alice: Caller, serve_operation: Callable[..., None]) -> None:
    serve_operation()
    assert alice.post(key="Key").content != alice.post(key="key").content
    assert effects() == 2


@pytest.mark.scenario(9)
def test_a_required_key_that_is_missing_is_refused(alice: Caller, serve_operation: Callable[..., None]) -> None:
    serve_operation()
    refused = alice.post()
    assert refused.status_code == 400
    assert problem_code(refused) == "idempotency_key_missing"
    assert "Idempotency-Key" not in refused
    assert effects() == 0
    assert not IdempotencyRecord.objects.exists()


@pytest.mark.scenario(9)
@pytest.mark.parametrize("by", ["policy", "setting"])
def test_without_an_optional_key_the_request_runs_unprotected(
    alice: Caller, serve_operation: Callable[..., None], settings: Any, by: str
) -> None:
    if by == "setting":
        settings.IDEMPOTENCY = {"REQUIRED": False}
        serve_operation()
    else:
        serve_operation(required=False)
    answers = [alice.post(), alice.post()]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert json.loads(answers[0].content)["operation"] is None
    assert not any("Idempotency-Key" in answer for answer in answers)
    assert effects() == 2
    assert not IdempotencyRecord.objects.exists()
    # With a key it is protected, and a bad key is no missing one.
    alice.post(key="k")
    assert alice.post(key="k")["Idempotency-Replayed"] == "true"
    assert alice.post(key="a,b").status_code == 400
    assert effects() == 3


BAD_KEYS = {
    "empty": "",
    "blank": "  ",
    "256 characters": "k" * 256,
    "256 characters, quoted": f'"{"k" * 256}"',
    "Latin-1": "schlüssel",
    "UTF-8 read as Latin-1": "é".encode().decode("latin-1"),
    "emoji": "\U0001f511",
    "comma-joined": "a,b",
    "comma-joined, with a space": "a, b",
    "comma-joined, quoted": '"a", "b"',
    "parameterised": '"a";v=1',
    "parameterised, bare": "a;v=1",
    "quoted, empty": '""',
    "quote left open": '"a',
    "quote within": 'a"b',
    "space within": "a b",
    "tab within": "a\tb",
    "NUL": "a\x00b",
    "DEL": "a\x7f",
    "folded": "a\r\n b",
    "line feed at the end": "a\n",
    "lone surrogate": "a\udc80",
}


@pytest.mark.scenario(10)
def test_a_malformed_key_is_refused(alice: Caller, serve_operation: Callable[..., None]) -> None:
    serve_operation()
    for name, key in BAD_KEYS.items():
        refused = alice.post(HTTP_IDEMPOTENCY_KEY=key)
        assert refused.status_code == 400, name
        assert problem_code(refused) == "idempotency_key_invalid"
        assert "Idempotency-Key" not in refused  # what did not parse is not sent back
    assert effects() == 0
    assert not IdempotencyRecord.objects.exists()


@pytest.mark.scenario(10)
def test_quoted_and_bare_are_one_key(alice: Caller, serve_operation: Callable[..., None]) -> None:
    serve_operation()
    answers = [alice.post(key=key) for key in ("abc", '"abc"', "  abc ", ' "abc"', "abc")]
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    assert effects() == 1
    assert IdempotencyRecord.objects.get().idempotency_key == "abc"


WELL_FORMED_KEYS = ["k", "k" * 255, f'"{"j" * 255}"', "!#$%&'()*+-./:<=>?@[\\]^_`{|}~", '"a,b;c=\\"d\\\\"']


@pytest.mark.scenario(10)
def test_every_well_formed_key_is_taken_and_echoed(alice: Caller, serve_operation: Callable[..., None]) -> None:
    serve_operation()
    for count, key in enumerate(WELL_FORMED_KEYS, start=1):
        for answer in (alice.post(key=key), alice.post(key=key)):
            assert answer.status_code == 201
            assert answer["Idempotency-Key"] == key
        assert effects() == count


@pytest.mark.scenario(11)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"])
@pytest.mark.parametrize("key", [None, "k", "a,b"], ids=["no key", "key", "bad key"])
def test_other_methods_pass_through(alice: Caller, serve: Serve, method: str, key: str | None) -> None:
    serve(idempotent("tests.any")(plain_answer))
    for _ in range(2):
        answer = alice.request(method, key=key)
        assert answer.status_code == 201
        assert "Idempotency-Key" not in answer
        assert "Idempotency-Replayed" not in answer
    assert effects() == 2
    assert not IdempotencyRecord.objects.exists()


@pytest.mark.scenario(11)
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
def test_other_methods_of_a_drf_view_pass_through(alice: Caller, serve: Serve, method: str) -> None:
    serve(api_view(["GET", "HEAD", "PUT", "DELETE", "POST"])(idempotent("tests.any")(drf_answer)))
    for _ in range(2):
        assert alice.request(method, key="k").status_code == 201
    assert effects() == 2
    assert not IdempotencyRecord.objects.exists()


@pytest.mark.scenario(11)
def test_the_policy_says_which_methods_are_protected(alice: Caller, serve: Serve) -> None:
    serve(idempotent("tests.put", methods=["PUT"])(plain_answer))
    assert alice.request("PUT", key="k").content == alice.request("PUT", key="k").content
    assert effects() == 1
    assert alice.post(key="k").content != alice.post(key="k").content
    assert effects() == 3


@pytest.mark.scenario(11)
def test_patch_is_protected(alice: Caller, serve_operation: Callable[..., None]) -> None:
    serve_operation()
    assert alice.patch(key="k").content == alice.patch(key="k").content
    assert effects() == 1
