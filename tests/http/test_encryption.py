"""Under ENCRYPTION_KEYS the database holds no recorded body that somebody could read."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.test import Client

from idempotency import REEXECUTE, claim
from idempotency.conf import settings as in_force
from idempotency.exceptions import OutcomeUnreadableError
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.outcome import ENVELOPE
from tests.http.callers import Caller, assert_refused, replayed
from tests.http.serving import Framework, Serve, serve_answer
from tests.records import purge_body_of

pytest.importorskip("cryptography", reason="cryptography is not installed")

from cryptography.fernet import Fernet

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
def test_a_body_is_encrypted_and_its_replay_is_the_same(settings: Any, framework: Framework, alice: Caller) -> None:
    use_keys(settings, OLD)
    framework.serve(lambda request: SECRET)
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


def test_a_body_that_is_not_json_is_encrypted(settings: Any, serve: Serve, alice: Caller) -> None:
    use_keys(settings, NEW)
    serve_answer(serve, lambda: HttpResponse(b"4111\xff", content_type="image/png"))
    assert replayed(alice)[0].content == b"4111\xff"
    assert "4111" not in stored()


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
