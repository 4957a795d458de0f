"""Operators' decisions: a compare-and-set on the state displayed, audited and announced by a signal. Scenario 28."""

import itertools
import logging
from unittest.mock import Mock

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.http import HttpResponse, JsonResponse, StreamingHttpResponse
from django.template.response import SimpleTemplateResponse

from idempotency import Operation
from idempotency.exceptions import UnrecordableResponseError
from idempotency.http.adapter import response_of
from idempotency.identity.fingerprint import Payload
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.operate import resolutions
from idempotency.operate.resolutions import ResolutionRefusedError, forget, mark_not_executed, record_outcome, release
from idempotency.outcome import Outcome
from idempotency.protocol import ownership
from idempotency.signals import recovered
from tests.concurrency.racing import elsewhere
from tests.database.claiming import OUTCOME, PAYLOAD, acquire, again, asks, parks, plain
from tests.records import HOUR, from_now, make_records

pytestmark = pytest.mark.django_db(transaction=True)

#: Headers that no operation here records.
UNRECORDED = {"X-Secret": "s", "Set-Cookie": "session=s"}


def record(operation=parks, status=Status.PARKED, **fields):
    """A record as displayed to an operator."""
    name = operation if isinstance(operation, str) else operation.name
    values = {"idempotency_key": "k", "expires": HOUR, "request_hash": PAYLOAD.request_hash, "operation": name}
    (pk,) = make_records(1, status, **values | fields)
    return IdempotencyRecord.objects.get(pk=pk)


def state(seen):
    now = IdempotencyRecord.objects.get(pk=seen.pk)
    return now.status, now.attempt


@pytest.mark.scenario_28
@pytest.mark.parametrize(
    ("found", "status", "content_type", "content"),
    [
        (JsonResponse({"id": 7}, status=201, headers=UNRECORDED), 201, "application/json", b'{"id": 7}'),
        (HttpResponse("gone", status=410), 410, "text/html; charset=utf-8", b"gone"),
        ({"id": 7}, 200, "application/json", b'{"id": 7}'),
        (None, 200, "application/json", b"null"),
    ],
)
def test_a_recorded_outcome_is_replayed(found, status, content_type, content):
    seen = record()
    record_outcome(seen, found, by="ops")
    assert state(seen) == ("completed", 1)
    assert IdempotencyRecord.objects.get().completed_at is not None
    outcome = acquire(parks)
    assert isinstance(outcome, Outcome)
    response = response_of(outcome)
    assert (response.status_code, response.content) == (status, content)
    assert response.headers == {"Content-Type": content_type}


class Rendered(SimpleTemplateResponse):
    rendered_content = "rendered"


@pytest.mark.parametrize("found", [Rendered("none"), Rendered("none").render()], ids=["not yet", "already"])
def test_a_template_response_is_rendered(found):
    record_outcome(record(), found, by="ops")
    assert response_of(acquire(parks)).content == b"rendered"


@pytest.mark.parametrize(
    ("found", "error"),
    [
        (HttpResponse(status=503), ValueError),
        (HttpResponse(status=429), ValueError),
        (StreamingHttpResponse(iter([b"x"])), UnrecordableResponseError),
        (HttpResponse(b"x" * (1024 * 1024 + 1)), UnrecordableResponseError),
        (object(), TypeError),
        (float("nan"), TypeError),
    ],
    ids=["503", "429", "stream", "too large", "no JSON", "NaN"],
)
def test_an_unrecordable_outcome_is_refused(found, error):
    seen = record()
    with pytest.raises(error):
        record_outcome(seen, found, by="ops")
    assert state(seen) == ("parked", 1)


def test_no_outcome_is_recorded_for_an_unknown_operation():
    seen = record("tests.resolutions.removed")
    with pytest.raises(ImproperlyConfigured, match=r"tests\.resolutions\.removed.*operations\.py"):
        record_outcome(seen, {}, by="ops")
    mark_not_executed(seen, by="ops")  # doesn't need the declaration
    assert state(seen) == ("recoverable", 1)


@pytest.mark.parametrize("operation", [plain, parks, asks, again, "tests.resolutions.removed"], ids=str)
def test_an_abandoned_claim_is_released_with_the_next_attempt_number(operation):
    seen = record(operation, Status.IN_PROGRESS, lease=HOUR)
    with pytest.raises(ResolutionRefusedError, match=r"lease is running.*Wait until \d{4}-.* UTC"):
        release(seen, by="ops")
    assert state(seen) == ("in_progress", 1)
    IdempotencyRecord.objects.update(lease_expires_at=from_now(-HOUR))
    release(IdempotencyRecord.objects.get(), by="ops")
    assert state(seen) == ("recoverable", 2)
    if isinstance(operation, Operation):
        assert acquire(operation).attempt == 3


@pytest.mark.postgres  # SQLite has one writer at a time: the operator waits for the owner's commit
def test_an_owner_about_to_commit_is_left_alone():
    owner = acquire(plain)
    IdempotencyRecord.objects.update(lease_expires_at=from_now(-HOUR))
    seen = IdempotencyRecord.objects.get()

    def try_to_release():
        with pytest.raises(ResolutionRefusedError, match="being settled by another process"):
            release(seen, by="ops")

    with transaction.atomic():
        ownership.complete(owner, OUTCOME)
        elsewhere(try_to_release)
    assert state(seen) == ("completed", 1)


def completed(operation=plain):
    ownership.record(acquire(operation), OUTCOME)
    return IdempotencyRecord.objects.get()


@pytest.mark.parametrize("payload", [PAYLOAD, Payload({"amount": 2})], ids=["same", "other"])
def test_a_forgotten_operation_runs_once_more_as_a_new_request(payload):
    seen = completed(parks)
    IdempotencyStep.objects.create(account_id=seen.account_id, record_id=seen.pk, name="pay", result="1")
    assert acquire(parks) == OUTCOME
    forget(seen, by="ops")
    second = acquire(parks, payload=payload)
    now = IdempotencyRecord.objects.get()
    assert (second.attempt, now.status, now.response_body) == (2, "in_progress", None)
    assert now.created_at > seen.created_at
    assert not IdempotencyStep.objects.exists()
    ownership.record(second, OUTCOME)
    assert acquire(parks, payload=payload) == OUTCOME
    assert IdempotencyRecord.objects.filter(expires_at__gt=from_now(HOUR)).exists()


def test_only_one_of_two_operators_forgets_a_record():
    seen = completed()
    forget(seen, by="ops")
    with pytest.raises(ResolutionRefusedError, match=r"is past its retention, so the next request .* runs anyway"):
        forget(seen, by="another")
    ownership.record(acquire(plain), OUTCOME)
    with pytest.raises(ResolutionRefusedError, match="is now completed, attempt 2; it was completed, attempt 1"):
        forget(seen, by="another")
    assert acquire(plain) == OUTCOME


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.COMPLETED])
def test_only_a_completed_operation_is_forgotten(status):
    seen = record(status=status, lease=HOUR if status is Status.IN_PROGRESS else None)
    with pytest.raises(ResolutionRefusedError, match="The decision is not possible in this state"):
        forget(seen, by="ops")
    assert (state(seen), seen.expires_at) == ((status, 1), IdempotencyRecord.objects.get().expires_at)


def test_forgetting_a_record_is_audited_and_sends_no_recovered_signal(audited):
    user, received = User.objects.create(username="olga"), Mock()
    seen = completed()
    recovered.connect(received)
    try:
        forget(seen, by=user, reason="repaired")
    finally:
        recovered.disconnect(received)
    (line,) = audited()
    assert line.endswith("completed, attempt 1: forgotten by 'olga', reason: 'repaired'")
    assert LogEntry.objects.get().get_change_message() == "forgotten: repaired"
    assert not received.called


DECISIONS = {
    "mark_not_executed": lambda seen: mark_not_executed(seen, by="ops"),
    "record_outcome": lambda seen: record_outcome(seen, {"id": 1}, by="ops"),
    "release": lambda seen: release(seen, by="ops"),
}


@pytest.mark.parametrize(
    ("decision", "status", "lease"),
    [
        *itertools.product(DECISIONS, [Status.COMPLETED, Status.RECOVERABLE], [None]),
        *itertools.product(["mark_not_executed", "record_outcome"], [Status.IN_PROGRESS], [HOUR, -HOUR]),
    ],
)
def test_a_decision_on_a_settled_or_live_record_is_refused(decision, status, lease):
    seen = record(status=status, lease=lease)
    message = f"is {status.replace('_', ' ')}, attempt 1. The decision is not possible"
    with pytest.raises(ResolutionRefusedError, match=message):
        DECISIONS[decision](seen)
    assert state(seen) == (status, 1)


@pytest.mark.parametrize("decision", DECISIONS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "completed"}, "is now completed, attempt 1; it was parked, attempt 1"),
        ({"attempt": 2}, "is now parked, attempt 2"),
        ({"status": "in_progress", "attempt": 2}, "is now in progress, attempt 2"),
        # This can happen in a restored database. The fence has the whole scope.
        ({"idempotency_key": "another row that took the id"}, "being settled"),
        (None, "has been purged"),
    ],
)
def test_a_decision_on_an_outdated_state_changes_nothing(decision, change, message):
    seen = record()
    if change is None:
        IdempotencyRecord.objects.all().delete()
    else:
        IdempotencyRecord.objects.update(**change)
    before = list(IdempotencyRecord.objects.values())
    with pytest.raises(ResolutionRefusedError, match=message):
        DECISIONS[decision](seen)
    assert list(IdempotencyRecord.objects.values()) == before
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize("by", [None, "", 7])
def test_a_decision_requires_a_by_argument(by):
    seen = record()
    with pytest.raises(TypeError, match="by="):
        mark_not_executed(seen, by=by)
    assert state(seen) == ("parked", 1)


@pytest.fixture(autouse=True)
def audited(caplog):
    """The lines of the audit."""
    caplog.set_level(logging.INFO, "idempotency.audit")
    return lambda: [one.getMessage() for one in caplog.records if one.name == "idempotency.audit"]


@pytest.mark.scenario_28
@pytest.mark.parametrize("decision", DECISIONS)
def test_a_decision_leaves_an_audit_entry(decision, audited):
    user = User.objects.create(username="olga")
    seen = record(idempotency_key="a-rather-long-key", account_id="42")
    arguments = [{"secret": "s"}] if decision == "record_outcome" else []
    getattr(resolutions, decision)(seen, *arguments, by=user, reason="asked the bank\nforged line")
    entry = LogEntry.objects.get()
    assert (entry.user, entry.get_edited_object()) == (user, seen)
    assert entry.get_change_message().endswith(": asked the bank\nforged line")
    (line,) = audited()
    assert "by 'olga', reason: 'asked the bank\\nforged line'" in line
    assert f"Record {seen.pk} (operation 'tests.parks', key a-rather…" in line
    assert "parked, attempt 1 to " in line
    assert "a-rather-long-key" not in line
    assert "secret" not in line + entry.change_message


@pytest.mark.parametrize("commits", [False, True])
def test_a_decision_commits_with_the_callers_transaction(commits, caplog):
    seen = record()
    with transaction.atomic():
        mark_not_executed(seen, by="ops")
        transaction.set_rollback(not commits)
        assert caplog.text == ""
    assert state(seen) == ("recoverable" if commits else "parked", 1)
    assert ("marked not executed by 'ops'" in caplog.text) is commits
    assert not LogEntry.objects.exists(), "ops is not a user"


@pytest.mark.parametrize("forged", ["\n", "\r", "\x1b[2K", "\x85", "\u2028", "\u202e", "', reason: 'x"])
def test_no_name_or_reason_can_forge_an_audit_line(forged, audited):
    seen = record(f"an{forged}operation", idempotency_key="k" * 9)
    mark_not_executed(seen, by=f"ops{forged}", reason=f"asked{forged}")
    (line,) = audited()
    assert line.isprintable()
    assert line.endswith(f"marked not executed by {f'ops{forged}'!r}, reason: {f'asked{forged}'!r}")


def test_without_the_admin_only_the_log_is_written(settings, caplog):
    user = User.objects.create(username="olga")
    settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if app != "django.contrib.admin"]
    mark_not_executed(record(), by=user)
    assert "by 'olga'" in caplog.text
    assert not LogEntry.objects.exists()


def test_a_decision_is_undone_if_its_audit_entry_fails(monkeypatch):
    monkeypatch.setattr(LogEntry.objects, "create", Mock(side_effect=RuntimeError("no room")))
    seen = record()
    with pytest.raises(RuntimeError, match="no room"):
        mark_not_executed(seen, by=User.objects.create(username="olga"))
    assert state(seen) == ("parked", 1)
