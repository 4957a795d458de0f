"""What is stored of a body: nothing to read for others under ENCRYPTION_KEYS, and nothing that ``redact`` removes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
from cryptography.fernet import Fernet
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.test import Client

from idempotency import REEXECUTE, claim
from idempotency.conf import settings as in_force
from idempotency.exceptions import OutcomeUnreadableError, UnrecordableResponseError
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.outcome import ENVELOPE
from tests.http.callers import Caller, assert_nothing_kept, assert_refused, effects, problem_code, replayed
from tests.http.serving import OUTSIDE, Framework, Serve, serve_answer
from tests.operations import forgetting_operations
from tests.records import purge_body_of

pytestmark = pytest.mark.django_db

OLD, NEW = Fernet.generate_key(), Fernet.generate_key().decode()
SECRET = {"card": "4111-1111", ENVELOPE: "no envelope"}


def use_keys(settings: Any, *keys: str | bytes) -> None:
    settings.IDEMPOTENCY = {"ENCRYPTION_KEYS": keys} if keys else {}


def test_the_message_of_an_error_may_quote_a_body_and_is_not_kept(settings: Any, transactional_db: None) -> None:
    use_keys(settings, NEW)
    with pytest.raises(ValueError, match="4111"), claim("encrypted.fails", account_id="1", key="k"):
        raise ValueError(SECRET)
    assert IdempotencyRecord.objects.get().error == "ValueError"


def stored() -> str:
    """What the database holds of the latest record."""
    body = IdempotencyRecord.objects.latest("pk").response_body
    assert body is not None
    return body


@pytest.mark.failure_52
@pytest.mark.parametrize("binary", [False, True], ids=["JSON", "bytes"])
def test_a_body_is_encrypted_and_its_replay_is_the_same(
    settings: Any, framework: Framework, alice: Caller, binary: bool
) -> None:
    use_keys(settings, OLD)
    framework.serve(lambda request: HttpResponse(b"4111-1111\xff", content_type="image/png") if binary else SECRET)
    first, _ = replayed(alice, wrote=0)
    assert b"4111-1111" in first.content
    assert stored().startswith(ENVELOPE)
    assert "4111-1111" not in stored()


@pytest.mark.failure_52
def test_keys_are_rotated(settings: Any, framework: Framework, alice: Caller) -> None:
    framework.serve(lambda request: SECRET)
    answers = {}
    for key, keys in (("plain", ()), ("old", (OLD,)), ("new", (NEW, OLD))):
        use_keys(settings, *keys)
        answers[key] = alice.post(key=key).content
    for key, content in answers.items():
        assert alice.post(key=key).content == content
    use_keys(settings, NEW)  # too early: a record is left that was made with the old key
    assert alice.post(key="new").content == answers["new"]
    assert_refused(alice, "idempotency_outcome_unreadable", key="old")
    purge_body_of("old")
    assert_refused(alice, "idempotency_body_gone", key="old")  # nobody needs a key to know that
    use_keys(settings)
    assert_refused(alice, "idempotency_outcome_unreadable", key="new")


def test_results_of_blocks_and_steps_are_encrypted(settings: Any) -> None:
    use_keys(settings, NEW)
    calls: list[str] = []

    def run(key: str = "k") -> Any:
        policy: dict[str, Any] = {"transaction": False, "recovery": REEXECUTE}
        with claim("tests.encrypted", account_id="1", key=key, **policy) as run:
            if run.claim is not None:
                run.result = run.claim.step("pay", lambda: calls.append("pay") or SECRET)
                if len(calls) == 1:
                    calls.append("cut off")
                    raise RuntimeError
        return run.result

    with pytest.raises(RuntimeError):
        run()
    assert "4111-1111" not in IdempotencyStep.objects.get().result
    assert [run(), run()] == [SECRET, SECRET]
    assert calls == ["pay", "cut off"]
    assert "4111-1111" not in stored()
    use_keys(settings, OLD)
    with pytest.raises(OutcomeUnreadableError):
        run()
    IdempotencyRecord.objects.update(status="recoverable")
    with pytest.raises(OutcomeUnreadableError, match=r"step 'pay' of operation 'tests\.encrypted' can't be read"):
        run()
    assert calls == ["pay", "cut off"]


@pytest.mark.urls("testproject.urls")
def test_people_with_the_permission_read_the_text(settings: Any, alice: Caller) -> None:
    use_keys(settings, NEW)
    alice.post("/transfers/", {"recipient": "4111-1111", "amount": 1}, key="k")
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    address = f"/admin/idempotency/idempotencyrecord/{IdempotencyRecord.objects.get().pk}/change/"
    assert "4111-1111" in client.get(address).content.decode()
    use_keys(settings, OLD)
    assert "its key is not among ENCRYPTION_KEYS" in client.get(address).content.decode()


@pytest.mark.parametrize("keys", ["hunter2", [], ["hunter2"], [NEW, "hunter2-é"], [NEW[:-4]]])
def test_a_key_of_another_form_is_refused_and_not_shown(keys: Any, settings: Any) -> None:
    settings.IDEMPOTENCY = {"ENCRYPTION_KEYS": keys}
    with pytest.raises(ImproperlyConfigured, match=r"ENCRYPTION_KEYS.*E026") as refused:
        in_force()
    assert "hunter2" not in str(refused.value)


def test_without_the_library_the_error_names_what_to_install(settings: Any) -> None:
    use_keys(settings, NEW)
    with (
        mock.patch("idempotency.options.validators.find_spec", return_value=None),
        pytest.raises(ImproperlyConfigured, match=r"pip install 'django-idempotency\[encryption\]'"),
    ):
        in_force()


# What ``redact`` removes is sent to the first client, and neither recorded nor sent again


WITH_TOKEN = {"id": 7, "token": "hunter2"}
REDACTED = {"id": 7, "token": None}


def without_token(status: int, headers: Mapping[str, str], body: bytes) -> bytes:
    assert (status, headers["content-type"]) == (201, "application/json")
    return json.dumps({**json.loads(body), "token": None}).encode()


def test_the_first_client_gets_the_whole_body_and_a_retry_the_redacted_one(framework: Framework, alice: Caller) -> None:
    framework.serve(lambda request: (WITH_TOKEN, 201), redact=without_token)
    first, retry = alice.post(key="k"), alice.post(key="k")
    assert first.json() == WITH_TOKEN
    assert (retry.json(), retry["Idempotency-Replayed"]) == (REDACTED, "true")
    assert (retry.status_code, retry["Content-Type"]) == (first.status_code, first["Content-Type"])
    assert "hunter2" not in stored()


def fail(*outcome: Any) -> bytes:
    raise ValueError(outcome)


@pytest.mark.parametrize("redact", [fail, lambda body: body, lambda *outcome: "a text"])
def test_a_body_that_was_not_redacted_is_not_recorded(serve: Serve, alice: Caller, redact: Any, caplog: Any) -> None:
    serve_answer(serve, lambda: HttpResponse(b"hunter2"), redact=redact)
    assert problem_code(assert_nothing_kept(alice, 500)) == "idempotency_response_unrecordable"
    assert "redact= of operation 'tests.answer'" in caplog.text
    assert "hunter2" not in caplog.text  # the error of fail() quotes the body


def test_an_effect_whose_outcome_was_not_redacted_is_parked(serve: Serve, alice: Caller) -> None:
    serve_answer(serve, lambda: HttpResponse(b"hunter2"), redact=fail, **OUTSIDE)
    codes = [problem_code(alice.post(key="k")) for _ in range(2)]
    assert codes == ["idempotency_response_unrecordable", "idempotency_outcome_unknown"]
    assert effects() == 1


def test_an_empty_body_needs_no_redaction(serve: Serve, alice: Caller) -> None:
    serve_answer(serve, lambda: HttpResponse(status=204), redact=fail)
    assert [alice.post(key="k").status_code for _ in range(2)] == [204, 204]


def run(redact: Any) -> Any:
    with forgetting_operations(), claim("redacted.block", account_id="1", key="k", redact=redact) as run:
        if not run.replayed:
            run.result = WITH_TOKEN
    return run.result


@pytest.mark.django_db(transaction=True)
def test_the_result_of_a_block_is_redacted_and_stays_json() -> None:
    with pytest.raises(TypeError, match="must turn a result into JSON"):
        run(lambda *outcome: b"no JSON: hunter2")
    with pytest.raises(UnrecordableResponseError, match=r"raised ValueError in line \d+ of .*test_stored_bodies\.py"):
        run(fail)
    assert IdempotencyRecord.objects.get().status == "recoverable"
    assert [run(lambda *outcome: json.dumps(REDACTED).encode()) for _ in range(2)] == [WITH_TOKEN, REDACTED]
