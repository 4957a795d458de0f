"""A record's page explains its state and offers decisions. A decision is confirmed first, then logged."""

import re
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from unittest.mock import Mock

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.urls import reverse

from idempotency import PARK, Operation, Reconcile, Unknown, claim
from idempotency.admin import decisions
from idempotency.bodies import BODY_GONE
from idempotency.http.adapter import response_of
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.outcome import Outcome
from idempotency.store import statement_timeout
from tests.http.admin.pages import (
    LIST,
    OUTCOME,
    charges,
    choose,
    decide,
    detail,
    hidden_fields,
    listed,
    log_in,
    messages_on,
    record,
    secret_record,
    text,
)
from tests.records import HOUR, make_records

# These pages show one row. The lists use more SQL, so ``test_records`` runs on every database.
pytestmark = [pytest.mark.django_db, pytest.mark.once]

parks = Operation.declare("tests.admin.parks", transaction=False, recovery=PARK)
reconciles = Operation.declare(
    "tests.admin.reconciles", transaction=False, recovery=Reconcile(lambda record: Unknown())
)

EVERY_ACTION = ["record_outcome", "mark_not_executed", "release"]


@pytest.fixture
def operator(client):
    decisions = [f"{name}_idempotencyrecord" for name in ("resolve", "release", "forget")]
    return log_in(client, "view_idempotencyrecord", *decisions)


def offered(page):
    return re.findall(r'<button type="submit" [^>]* name="action" value="(\w+)">', page.content.decode())


COMPLETED = {"status": Status.COMPLETED}
BODY_DUE = {**COMPLETED, "body_expires_at": datetime(2026, 11, 1, tzinfo=UTC)}
RECOVERABLE = {"status": Status.RECOVERABLE}
LIVE = {"status": Status.IN_PROGRESS, "lease": HOUR, "attempt": 2}
ABANDONED = {"status": Status.IN_PROGRESS, "lease": -HOUR, "attempt": 2}


@pytest.mark.parametrize(
    ("fields", "badge", "state", "guidance", "actions"),
    [
        (COMPLETED, "done", "completed, 201", ", every retry gets the recorded outcome.", ["forget"]),
        ({**COMPLETED, "expires": -HOUR}, "done", "completed, 201", "Its retention ended at ", []),
        (BODY_DUE, "done", "completed, 201", "A purge deletes the response after ", ["forget"]),
        (
            {**COMPLETED, "response_body": BODY_GONE},
            "done",
            "completed, 201",
            "The response is no longer kept.",
            ["forget"],
        ),
        ({**RECOVERABLE, "attempt": 3}, "waiting", "recoverable", "Attempt 3 is known to have had no effect.", []),
        ({**RECOVERABLE, "expires": -HOUR}, "waiting", "recoverable", "a request with its key now runs", []),
        (LIVE, "plain", "in progress, lease running", ", attempt 2 is presumed to be running.", []),
        (ABANDONED, "waiting", "in progress, lease over", "The lease of attempt 2 ended at ", ["release"]),
        ({"attempt": 4}, "stuck", "parked", "Attempt 4 ended without a recorded outcome", EVERY_ACTION),
        ({}, "stuck", "parked", "If it took effect, record its outcome.", EVERY_ACTION),
        ({"expires": -HOUR}, "stuck", "parked", "Its retention ended at ", EVERY_ACTION),
        ({"status": "sealed"}, "plain", "sealed", "A newer release wrote this state.", []),
    ],
)
def test_the_page_shows_the_state_and_offers_the_possible_decisions(operator, fields, badge, state, guidance, actions):
    page = operator.get(detail(record(**fields)))
    assert guidance in text(page)
    assert offered(page) == actions
    for shown in (page.content.decode(), operator.get(LIST).content.decode()):
        assert f'<span class="idempotency-state idempotency-{badge}">{state}</span>' in shown
        assert "idempotency/admin.css" in shown


def test_a_long_key_is_shortened_in_the_list_only(operator):
    key = "2026-10-05-order-of-a-customer-8e03978e"
    pk = record(idempotency_key=key)
    assert "2026-10-05-o…8e03978e parked" in text(operator.get(LIST))
    assert f"Key: {key} " in text(operator.get(detail(pk)))
    assert key in text(choose(operator, "release", pk))
    assert [shown.idempotency_key for shown in listed(operator, q="2026-10-05-o…8e03978e")] == [key]


@pytest.mark.parametrize(
    ("operation", "abandoned", "parked"),
    [
        (charges.name, "the next retry runs it again", "now declares REEXECUTE"),
        (reconciles.name, "declares a reconciler, which the next retry or sweep calls", "none of its results settled"),
        (parks.name, "declares PARK: the next retry or sweep parks", "declares PARK, so it never runs again"),
        ("tests.admin.elsewhere", "Its operation is not declared", "Its operation is not declared"),
    ],
)
def test_the_page_explains_the_declared_recovery(operator, operation, abandoned, parked):
    left = record(Status.IN_PROGRESS, operation, lease=-timedelta(minutes=3))
    assert abandoned in text(operator.get(detail(left)))
    assert parked in text(operator.get(detail(record(operation=operation))))


def test_a_button_leads_to_the_decision_and_back_to_the_record(operator):
    pk, other = record(), record()
    question = operator.post(LIST, {"action": "release", **hidden_fields(operator.get(detail(pk)))})
    assert f'href="{detail(pk)}" class="closelink"' in question.content.decode()
    again = operator.post(LIST, {**hidden_fields(question), "reason": ""})
    answer = operator.post(LIST, {**hidden_fields(again), "reason": "asked"}, follow=True)
    assert answer.redirect_chain == [(detail(pk), 302)]
    assert messages_on(answer)[0].endswith(": 1 idempotency record.")
    assert IdempotencyRecord.objects.get(pk=other).status == Status.PARKED
    IdempotencyRecord.objects.all().delete()
    answer = operator.post(LIST, {**hidden_fields(question), "reason": "asked"}, follow=True)
    assert answer.redirect_chain == [(LIST, 302)]
    assert messages_on(answer) == [f"Idempotency record {pk} has been purged."]
    assert decide(operator, question, reason="") == []  # an invalid form is shown again even if the record is gone


def test_the_list_shows_attempts_and_leases_of_unfinished_records(operator):
    record(Status.COMPLETED, account_id="alice")
    record(Status.IN_PROGRESS, lease=-timedelta(seconds=61), attempt=3, account_id="bob")
    rows = text(operator.get(LIST))
    assert re.search(rf"in progress, lease over attempt 3, over for 1 min \d+ s {charges.name} account bob", rows)
    assert f"completed, 201 {charges.name} account alice" in rows


def state_of(pk):
    return IdempotencyRecord.objects.values_list("status", "attempt").get(pk=pk)


@pytest.mark.scenario_28
@pytest.mark.parametrize("action", EVERY_ACTION)
def test_resolving_a_parked_record_needs_confirmation_and_is_logged(operator, action):
    pk = record(idempotency_key="8e03978e")
    page = choose(operator, action, pk)
    seen = text(page)
    assert [part for part in (charges.name, "8e03978e", "parked", "No, take me back") if part not in seen] == []
    assert "takes effect" in seen or "took effect" in seen
    assert state_of(pk) == ("parked", 1)  # nothing was decided yet

    values = OUTCOME if action == "record_outcome" else {"reason": "asked the bank"}
    (answer,) = decide(operator, page, **values)
    assert answer.endswith(": 1 idempotency record.")
    assert state_of(pk) == ("completed" if action == "record_outcome" else "recoverable", 1)
    history = text(operator.get(detail(pk, "history")))
    assert [part for part in ("asked the bank", "staff") if part not in history] == []
    assert LogEntry.objects.values_list("object_id", "user__username").get() == (str(pk), "staff")


def test_a_recorded_outcome_is_replayed_as_entered(operator):
    pk = record()
    decide(operator, choose(operator, "record_outcome", pk), **{**OUTCOME, "body": '{\r\n"id": 7}\r\n'})
    row = IdempotencyRecord.objects.get(pk=pk)
    assert (row.response_status, row.response_body) == (201, '{\n"id": 7}\n')
    assert row.response_headers == [["Content-Type", "application/json"]]
    other = record()
    plain = {**OUTCOME, "status": "402", "content_type": "text/plain", "body": "  no\n"}
    decide(operator, choose(operator, "record_outcome", other), **plain)
    row = IdempotencyRecord.objects.get(pk=other)
    assert response_of(Outcome.stored(402, row.response_headers, row.response_body, None)).content == b"  no\n"


def test_an_outcome_that_the_operation_would_not_record_is_refused(operator):
    pk = record()
    (answer,) = decide(operator, choose(operator, "record_outcome", pk), **{**OUTCOME, "status": "503"})
    assert "does not record responses of status 503" in answer
    assert state_of(pk) == ("parked", 1)


def undecidable():
    """Records for which some of the actions are impossible, by the reason."""
    return {
        "completed": record(Status.COMPLETED),
        "newer": record("sealed"),
        "unknown": record(operation="tests.admin.removed"),
        "alive": record(Status.IN_PROGRESS, parks.name, lease=HOUR, expires=2 * HOUR),
    }


WRONG_STATE = "Its state does not allow this action."


IMPOSSIBLE = [
    *[(action, state, WRONG_STATE) for action in EVERY_ACTION for state in ("completed", "newer")],
    ("record_outcome", "unknown", "Its operation is not declared in this process."),
    ("mark_not_executed", "alive", WRONG_STATE),
    ("release", "alive", "Wait until the lease is over."),
]


def test_an_impossible_decision_is_not_offered(operator):
    pks = undecidable()
    for action, name, why in IMPOSSIBLE:
        pk = pks[name]
        before = state_of(pk)
        page = operator.post(LIST, {"action": action, "_selected_action": [pk]}, follow=True)
        assert why in text(page), (action, name)
        assert 'name="seen"' not in page.content.decode()
        assert action not in offered(operator.get(detail(pk)))
        forged = f"{pk}:{before[1]}:{before[0]}"
        values = {"action": action, "_selected_action": [pk], "decided": "yes", "seen": forged, **OUTCOME}
        assert operator.post(LIST, values, follow=True).status_code == (400 if why == WRONG_STATE else 200)
        assert state_of(pk) == before


def test_rows_that_cannot_be_decided_are_listed_separately(operator):
    pks = {**undecidable(), "parked": record(idempotency_key="8e03978e")}
    page = choose(operator, "mark_not_executed", *pks.values())
    assert re.findall(r'name="seen" value="(\d+):', page.content.decode()) == [str(pks["parked"]), str(pks["unknown"])]
    decidable, _, left_out = text(page).partition("Left out")
    assert "8e03978e" in decidable
    assert "8e03978e" not in left_out
    assert left_out.count(WRONG_STATE) == 3
    answers = decide(operator, page, reason="asked the bank")
    assert answers == ["Mark as not executed: 2 idempotency records."]
    assert state_of(pks["alive"]) == ("in_progress", 1)


def test_a_decision_applies_to_the_displayed_state_only(operator):
    """Between the question and the answer, another operator, a retry or the purge may change a row."""
    first, second, third, fourth = (record() for _ in range(4))
    page = choose(operator, "mark_not_executed", first, second, third, fourth, url=f"{LIST}?state=parked")
    IdempotencyRecord.objects.filter(pk=second).update(status=Status.COMPLETED)
    IdempotencyRecord.objects.filter(pk=third).update(attempt=2)
    IdempotencyRecord.objects.filter(pk=fourth).delete()
    answers = decide(operator, page, reason="asked")
    assert [answer for answer in answers if "is now completed, attempt 1" in answer]
    assert [answer for answer in answers if "is now parked, attempt 2" in answer]
    assert f"Idempotency record {fourth} has been purged." in answers
    assert answers[-1] == "Mark as not executed: 1 idempotency record."
    assert [state_of(pk) for pk in (first, second, third)] == [("recoverable", 1), ("completed", 1), ("parked", 2)]


def test_a_decision_that_can_double_an_effect_is_marked_dangerous(operator):
    page = operator.get(detail(record())).content.decode()
    dangerous = re.findall(r'class="button idempotency-dangerous"[^>]* value="(\w+)"', page)
    assert dangerous == ["mark_not_executed", "release"]
    assert 'class="errornote idempotency-alarm"' in choose(operator, "mark_not_executed", record()).content.decode()


def test_the_page_shows_the_derived_keys_of_steps_and_named_calls(operator):
    pk = record(Status.COMPLETED, account_id="alice")
    row = IdempotencyRecord.objects.get(pk=pk)
    IdempotencyStep.objects.create(account_id="alice", record_id=pk, name="charge", result="1")
    shown = text(operator.get(detail(pk), {"call": "refund"}))
    for name in ("charge", "refund"):
        assert f"{name} {row.derive_key(name)} or {row.derive_text(name)}" in shown
    assert row.scope.trace in shown


def test_calls_of_the_running_process_are_listed_with_their_derived_keys(operator, monkeypatch):
    monkeypatch.setattr("idempotency.operation.MAX_CALLS", 3)
    operation = Operation.declare("tests.admin.calls")
    with claim(operation.name, account_id="alice", key="one") as run:
        for name in ("provider.pay", "provider.ship", "provider.pay"):
            run.claim.derive_key(name)
        for name in ("provider.text", "too many"):
            run.claim.derive_text(name)
        run.result = None
    other = IdempotencyRecord.objects.get(pk=record(operation=operation.name, account_id="bob"))
    shown = text(operator.get(detail(other.pk)))
    for name in ("provider.pay", "provider.ship", "provider.text"):
        assert f"{name} {other.derive_key(name)} or {other.derive_text(name)}" in shown
    assert "too many" not in shown


@pytest.mark.failure_111
def test_the_outcome_form_names_what_is_missing_and_what_to_compare(operator, monkeypatch):
    make_records(1, operation=charges.name, account_id="bob", response_body='{"old": 1}', response_status=201)
    make_records(1, operation=charges.name, account_id="bob", response_body='{"id": "ch-7"}', response_status=202)
    make_records(1, operation="tests.admin.another", response_body='{"other": 2}')
    pk = record(account_id="alice")
    IdempotencyStep.objects.create(account_id="alice", record_id=pk, name="charge", result="1")
    form = choose(operator, "record_outcome", pk)
    shown = text(form)
    assert "The handler does not run. Rows that it writes besides its response are missing" in shown
    assert str(IdempotencyRecord.objects.get(pk=pk).derive_key("charge")) in shown
    assert "ch-7" not in shown  # a response needs another permission
    for other in ("mark_not_executed", "release"):
        assert "The handler does not run" not in text(choose(operator, other, pk))
    User.objects.get().user_permissions.add(Permission.objects.get(codename="view_response_body"))
    shown = text(choose(operator, "record_outcome", pk))
    assert "The operation's latest outcome, with status 202" in shown
    assert '{"id": "ch-7"}' in shown
    assert "ch-7" not in str(form.context["form"]["body"])  # the values of another customer are not filled in
    assert [other for other in ("old", "other") if f'"{other}"' in shown] == []
    limits = iter([nullcontext, nullcontext, nullcontext, Mock(side_effect=statement_timeout.OutOfTimeError)])
    monkeypatch.setattr(statement_timeout, "time_limit", lambda using: next(limits)())
    shown = text(choose(operator, "record_outcome", pk))
    assert ("latest outcome" in shown, "The handler does not run" in shown) == (False, True)


def test_a_decision_about_one_record_speaks_of_one(operator):
    pks = [record(), record()]
    assert "You know that this operation did not take effect" in text(choose(operator, "mark_not_executed", pks[0]))
    assert "You know that these operations did not take effect" in text(choose(operator, "mark_not_executed", *pks))


def test_the_index_has_one_section_for_the_apps_of_the_package(client):
    log_in(client, superuser=True)
    own = [app for app in client.get(reverse("admin:index")).context["app_list"] if "idempotency" in app["app_label"]]
    names = ["Dashboard", "Idempotency records", "Outbox messages"]
    assert [(app["name"], [model["name"] for model in app["models"]]) for app in own] == [("Idempotency", names)]
    for label in ("idempotency", "idempotency_outbox", "auth"):
        page = client.get(reverse("admin:app_list", args=[label]))
        assert len(page.context["app_list"]) == 1, label


def test_a_decision_is_limited_to_one_page_of_rows(operator, monkeypatch):
    monkeypatch.setattr(decisions, "MAX_DECIDED", 2)
    pks = [record() for _ in range(3)]
    page = operator.post(LIST, {"action": "release", "_selected_action": pks}, follow=True)
    assert "Release: select up to 2 at a time." in text(page)
    everything = {"action": "release", "_selected_action": pks[:1], "select_across": "1"}
    assert "select up to 2 at a time" in text(operator.post(LIST, everything, follow=True))
    assert decide(operator, choose(operator, "release", *pks[:2]), reason="x") == ["Release: 2 idempotency records."]
    one = operator.post(LIST, {"action": "record_outcome", "_selected_action": pks}, follow=True)
    assert "Record an outcome: select up to 1 at a time." in text(one)
    forged = {"action": "release", "_selected_action": pks, "decided": "yes", "reason": "x"}
    operator.post(LIST, {**forged, "seen": [f"{pk}:1:parked" for pk in [pks[0], pks[0], pks[2]]]})
    assert state_of(pks[2]) == ("parked", 1)


@pytest.mark.failure_52
def test_resolving_without_the_body_permission_shows_no_body(operator):
    pk = secret_record(expires=HOUR, operation=charges.name)
    IdempotencyRecord.objects.update(status=Status.PARKED)
    for action in EVERY_ACTION:
        assert "4242" not in choose(operator, action, pk).content.decode()
    decide(operator, choose(operator, "record_outcome", pk), **{**OUTCOME, "body": '"5353"'})
    for page in (operator.get(LIST), operator.get(detail(pk)), operator.get(detail(pk, "history"))):
        assert "5353" not in page.content.decode()
