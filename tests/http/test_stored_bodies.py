"""Stored bodies: encrypted, redacted, and kept for a shorter time than their record."""

import io
import json
from datetime import timedelta
from unittest import mock

import pytest
from cryptography.fernet import Fernet
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured
from django.http import FileResponse, HttpResponse, JsonResponse
from django.test import Client

from idempotency import PARK, REEXECUTE, Attach, Operation, claim, require_claim
from idempotency.bodies import ENVELOPE
from idempotency.conf import settings as in_force
from idempotency.exceptions import BodyGoneError, OutcomeUnreadableError, UnrecordableResponseError
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.operate.purge import purge_body_batches
from idempotency.operate.resolutions import record_outcome
from idempotency.outcome import outcome_of
from idempotency.protocol import ownership
from tests.database.claiming import acquire
from tests.http.callers import assert_nothing_kept, assert_refused, effects, problem_code, replayed
from tests.http.serving import OUTSIDE, serve_answer
from tests.operations import forgetting_operations, redeclare
from tests.records import HOUR, database_now, expire, from_now, purge_body_of

pytestmark = pytest.mark.django_db

OLD, NEW = Fernet.generate_key(), Fernet.generate_key().decode()
SECRET = {"card": "4111-1111", ENVELOPE: "not an envelope"}


def use_keys(settings, *keys):
    settings.IDEMPOTENCY = {"ENCRYPTION_KEYS": keys} if keys else {}


def test_under_encryption_an_errors_message_is_not_kept(settings, transactional_db):
    use_keys(settings, NEW)
    with pytest.raises(ValueError, match="4111"), claim("encrypted.fails", account_id="1", key="k"):
        raise ValueError(SECRET)
    assert IdempotencyRecord.objects.get().error == "ValueError"


def stored():
    """The stored body of the latest record."""
    return IdempotencyRecord.objects.latest("pk").response_body


@pytest.mark.failure_52
@pytest.mark.parametrize("binary", [False, True], ids=["JSON", "bytes"])
def test_a_body_is_encrypted_and_replayed(settings, framework, alice, binary):
    use_keys(settings, OLD)
    framework.serve(lambda request: HttpResponse(b"4111-1111\xff", content_type="image/png") if binary else SECRET)
    first, _ = replayed(alice, wrote=0)
    assert b"4111-1111" in first.content
    assert stored().startswith(ENVELOPE)
    assert "4111-1111" not in stored()


@pytest.mark.failure_52
def test_keys_are_rotated(settings, framework, alice):
    framework.serve(lambda request: SECRET)
    answers = {}
    for key, keys in (("plain", ()), ("old", (OLD,)), ("new", (NEW, OLD))):
        use_keys(settings, *keys)
        answers[key] = alice.post(key=key).content
    for key, content in answers.items():
        assert alice.post(key=key).content == content
    use_keys(settings, NEW)  # too early: a record encrypted with the old key is still there
    assert alice.post(key="new").content == answers["new"]
    assert_refused(alice, "idempotency_outcome_unreadable", key="old")
    purge_body_of("old")
    assert_refused(alice, "idempotency_body_gone", key="old")  # this needs no encryption key
    use_keys(settings)
    assert_refused(alice, "idempotency_outcome_unreadable", key="new")


def test_results_of_blocks_and_steps_are_encrypted(settings):
    use_keys(settings, NEW)
    calls = []

    def run(key="k"):
        policy = {"transaction": False, "recovery": REEXECUTE}
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
def test_the_admin_shows_the_decrypted_body_with_the_permission(settings, alice):
    use_keys(settings, NEW)
    alice.post("/transfers/", {"recipient": "4111-1111", "amount": 1}, key="k")
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    address = f"/admin/idempotency/idempotencyrecord/{IdempotencyRecord.objects.get().pk}/change/"
    assert "4111-1111" in client.get(address).content.decode()
    use_keys(settings, OLD)
    assert "its key is not among ENCRYPTION_KEYS" in client.get(address).content.decode()


@pytest.mark.parametrize("keys", ["hunter2", [], ["hunter2"], [NEW, "hunter2-é"], [NEW[:-4]]])
def test_a_malformed_encryption_key_is_refused_and_not_shown(keys, settings):
    settings.IDEMPOTENCY = {"ENCRYPTION_KEYS": keys}
    with pytest.raises(ImproperlyConfigured, match=r"ENCRYPTION_KEYS.*E003") as refused:
        in_force()
    assert "hunter2" not in str(refused.value)


def test_without_the_library_the_error_names_the_extra(settings):
    use_keys(settings, NEW)
    with (
        mock.patch("idempotency.options.validators.find_spec", return_value=None),
        pytest.raises(ImproperlyConfigured, match=r"pip install 'django-idempotency\[encryption\]'"),
    ):
        in_force()


WITH_TOKEN = {"id": 7, "token": "hunter2"}
REDACTED = {"id": 7, "token": None}


def without_token(status, headers, body):
    assert (status, headers["content-type"]) == (201, "application/json")
    return json.dumps({**json.loads(body), "token": None}).encode()


def test_the_first_client_gets_the_whole_body_and_a_retry_the_redacted_one(framework, alice):
    framework.serve(lambda request: (WITH_TOKEN, 201), redact=without_token)
    first, retry = alice.post(key="k"), alice.post(key="k")
    assert first.json() == WITH_TOKEN
    assert (retry.json(), retry["Idempotency-Replayed"]) == (REDACTED, "true")
    assert (retry.status_code, retry["Content-Type"]) == (first.status_code, first["Content-Type"])
    assert "hunter2" not in stored()


def fail(*outcome):
    raise ValueError(outcome)


@pytest.mark.parametrize("redact", [fail, lambda body: body, lambda *outcome: "a text"])
def test_a_body_that_was_not_redacted_is_not_recorded(serve, alice, redact, caplog):
    serve_answer(serve, lambda: HttpResponse(b"hunter2"), redact=redact)
    assert problem_code(assert_nothing_kept(alice, 500)) == "idempotency_response_unrecordable"
    assert "redact= of operation 'tests.answer'" in caplog.text
    assert "hunter2" not in caplog.text  # the error of fail() quotes the body


def test_an_effect_whose_outcome_was_not_redacted_is_parked(serve, alice):
    serve_answer(serve, lambda: HttpResponse(b"hunter2"), redact=fail, **OUTSIDE)
    codes = [problem_code(alice.post(key="k")) for _ in range(2)]
    assert codes == ["idempotency_response_unrecordable", "idempotency_outcome_unknown"]
    assert effects() == 1


def test_an_empty_body_needs_no_redaction(serve, alice):
    serve_answer(serve, lambda: HttpResponse(status=204), redact=fail)
    assert [alice.post(key="k").status_code for _ in range(2)] == [204, 204]


def run(redact):
    with forgetting_operations(), claim("redacted.block", account_id="1", key="k", redact=redact) as run:
        if not run.replayed:
            run.result = WITH_TOKEN
    return run.result


@pytest.mark.django_db(transaction=True)
def test_the_result_of_a_block_is_redacted_and_stays_json():
    with pytest.raises(TypeError, match="must turn a result into JSON"):
        run(lambda *outcome: b"not JSON: hunter2")
    with pytest.raises(UnrecordableResponseError, match=r"raised ValueError in line \d+ of .*test_stored_bodies\.py"):
        run(fail)
    assert IdempotencyRecord.objects.get().status == "recoverable"
    assert [run(lambda *outcome: json.dumps(REDACTED).encode()) for _ in range(2)] == [REDACTED, REDACTED]


def purge_bodies():
    return sum(batch.deleted for batch in purge_body_batches())


def test_a_retry_after_the_bodys_retention_gets_body_gone_and_does_not_run(framework, alice):
    framework.serve(body_retention=HOUR)
    first, _ = replayed(alice)
    assert purge_bodies() == 0  # not due yet
    assert alice.post(key="k").content == first.content
    purge_body_of("k")
    gone = assert_refused(alice, "idempotency_body_gone", key="k")
    assert "has completed, and its response is no longer kept" in json.loads(gone.content)["detail"]
    assert ("Retry-After" in gone, gone["Idempotency-Status"]) == (False, "recorded")
    assert_refused(alice, "idempotency_key_reused", key="k", data={"amount": 2})
    record = IdempotencyRecord.objects.get()
    assert (record.response_status, record.response_headers, record.body_expires_at) == (201, [], None)
    assert record.completed_at is not None
    # Past its retention, the key starts a new request, whose body gets a new retention.
    expire(IdempotencyRecord.objects.get().pk)
    replayed(alice)
    left = IdempotencyRecord.objects.get().body_expires_at
    assert timedelta(minutes=59) < left - database_now() <= HOUR


def test_a_record_that_starts_over_clears_the_old_body_expiry():
    """Otherwise the next body would be deleted too early if body_retention is no longer declared."""
    with forgetting_operations("bodies."):
        operation = Operation.declare("bodies.over", body_retention=HOUR)
        ownership.record(acquire(operation), outcome_of(HttpResponse(), operation.policy))
        assert IdempotencyRecord.objects.get().body_expires_at is not None
        expire(IdempotencyRecord.objects.get().pk)
    with forgetting_operations("bodies."):
        assert acquire(Operation.declare("bodies.over")).attempt == 2
        assert IdempotencyRecord.objects.get().body_expires_at is None


def rebuilt(reference, request):
    return JsonResponse({"rebuilt": reference})


def answer_with_reference():
    require_claim().reference = "7"
    return HttpResponse(b"first", status=201)


def test_a_body_is_replayed_and_when_deleted_rebuilt(serve, alice, monkeypatch):
    serve_answer(serve, answer_with_reference, rebuild=rebuilt, body_retention=HOUR)
    replayed(alice)
    purge_body_of("k")
    answer = alice.post(key="k")
    assert (json.loads(answer.content), answer["Idempotency-Replayed"]) == ({"rebuilt": "7"}, "true")
    assert effects() == 1
    assert IdempotencyRecord.objects.get().response_body is None  # as in a record that never had a body
    redeclare(monkeypatch, "tests.answer", rebuild=None)
    assert_refused(alice, "idempotency_outcome_unreadable", key="k")


def test_a_response_without_a_storable_body_is_recorded_as_its_reference():
    plain = Operation.declare("bodies.plain", rebuild=rebuilt, body_retention=HOUR, max_response_body=10)
    job = Operation.declare(
        "bodies.job", rebuild=rebuilt, body_retention=HOUR, in_progress=Attach(lambda scope: "/job/")
    )
    without = Operation.declare("bodies.without", rebuild=rebuilt)
    for operation, response in (
        (plain, FileResponse(io.BytesIO(b"a"))),
        (plain, HttpResponse(b"a" * 11)),
        (job, HttpResponse(b"it runs", status=202)),
        (without, HttpResponse(b"a")),
    ):
        outcome = outcome_of(response, operation.policy, "7")
        assert (outcome.body, outcome.reference) == (None, "7")
    assert outcome_of(HttpResponse(b"a"), plain.policy, "7").body is not None


def test_a_deleted_result_of_a_block_is_an_error_and_the_block_is_not_run():
    def run():
        with forgetting_operations(), claim("bodies.block", account_id="1", key="k", body_retention=HOUR) as one:
            assert not one.replayed
            one.result = {"id": 1}
        return one.result

    assert run() == {"id": 1}
    purge_body_of("k")
    with pytest.raises(BodyGoneError, match="no longer kept"):
        run()


def test_an_outcome_recorded_by_an_operator_has_the_same_body_retention(settings):
    operation = Operation.declare("bodies.parked", transaction=False, recovery=PARK)
    ownership.park(acquire(operation))
    settings.IDEMPOTENCY = {"BODY_RETENTION": HOUR}
    record_outcome(IdempotencyRecord.objects.get(), {"id": 1}, by="ops")
    IdempotencyRecord.objects.update(body_expires_at=from_now(-HOUR))
    assert purge_bodies() == 1
    with pytest.raises(BodyGoneError), claim(operation, account_id="1", key="k", payload={"amount": 1}):
        pass


def test_the_body_purge_changes_completed_records_only():
    acquire(Operation.declare("bodies.claimed", body_retention=HOUR))
    # A release without this column may have left an old time in a record that it started over.
    IdempotencyRecord.objects.update(body_expires_at=from_now(-HOUR))
    assert purge_bodies() == 0
    assert IdempotencyRecord.objects.get().status == Status.IN_PROGRESS
