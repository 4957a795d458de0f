"""A failure outside a transaction is recovered as declared."""

import time
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
from django.db import DatabaseError, connection, transaction
from django.db.models import F

from idempotency import REEXECUTE, Operation, require_claim
from idempotency.exceptions import TransactionBrokenError
from idempotency.identity.scope import Scope
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.protocol import ownership
from idempotency.protocol.claim import Claim
from idempotency.protocol.execution import running
from idempotency.store import Fence, store_for
from tests.concurrency.failures import IN_PROGRESS, UNAVAILABLE, cut_connection, fail, problem, unreachable
from tests.concurrency.racing import Gate, held
from tests.concurrency.traces import effects, end_lease, end_retention, is_replay, record, state
from tests.concurrency.urls import handler


def test_a_late_attempt_does_not_get_the_outcome_of_a_newer_payload(post):
    def replaced(request):
        if handler.attempts == [1]:
            end_lease()
            end_retention()
            assert post("/again/", label="other").status_code == 201

    handler.before = replaced
    late = post("/again/")
    assert (problem(late), late["Retry-After"]) == (IN_PROGRESS, "1")


@pytest.mark.failure_74
@pytest.mark.postgres
@pytest.mark.parametrize("path", ["/park/", "/again/", "/reconciled/"])
def test_an_outcome_survives_a_connection_lost_during_the_handler(post, path):
    handler.after = cut_connection
    first = post(path)
    assert first.status_code == 201
    handler.after = lambda request: None
    assert is_replay(post(path), first)
    assert (effects(), handler.attempts) == (["one"], [1])


@pytest.mark.failure_74
@pytest.mark.postgres
def test_a_failure_after_the_connection_died_is_still_parked(post):
    def cut_and_fail(request):
        cut_connection()
        fail()

    handler.after = cut_and_fail
    assert post("/park/").status_code == 500
    assert record().status == "parked"


@pytest.mark.failure_74
def test_an_outcome_with_an_unconfirmed_commit_is_found_and_not_rewritten(post, monkeypatch):
    complete = ownership.complete
    tries = []

    def lose_the_first_answer(owned, outcome):
        complete(owned, outcome)  # the update commits at once
        tries.append(1)
        if len(tries) == 1:
            monkeypatch.setattr(connection, "is_usable", lambda: False)
            unreachable()

    monkeypatch.setattr(ownership, "complete", lose_the_first_answer)
    answer = post("/park/")
    assert (answer.status_code, len(tries)) == (201, 1)
    assert "Idempotency-Replayed" not in answer  # the attempt has recorded it
    assert post("/park/").content == answer.content
    assert (*state(), handler.attempts) == ("completed", ["one"], [1])


@pytest.mark.failure_74
def test_a_step_with_an_unconfirmed_commit_is_stored_once(post, monkeypatch):
    commit = connection._commit

    def commit_and_break():
        del connection._commit
        commit()
        connection.is_usable = until_there_is_another_one
        unreachable()

    def until_there_is_another_one():
        del connection.is_usable
        return False

    def pay():
        connection._commit = commit_and_break

    monkeypatch.setattr(ownership, "FIRST_PAUSE", 0)
    handler.after = lambda request: require_claim().step("pay", pay)
    assert post("/park/").status_code == 201
    assert IdempotencyStep.objects.count() == 1


@pytest.mark.failure_74
@pytest.mark.postgres
@pytest.mark.parametrize("cut", ["in the step", "before the step", "before a renewal"])
def test_a_connection_that_died_is_replaced_for_a_step_and_a_renewal(post, cut):
    calls = []

    def pay():
        calls.append("paid")
        if cut == "in the step":
            cut_connection()
        return 71

    def phases(request):
        current = require_claim()
        if cut != "in the step":
            cut_connection()
        if cut == "before a renewal":
            current.renew()
        assert current.step("pay", pay) == 71

    handler.after = phases
    answer = post("/park/")
    assert answer.status_code == 201
    assert post("/park/").content == answer.content
    assert (calls, record().status) == (["paid"], "completed")
    assert [step.result for step in IdempotencyStep.objects.all()] == ["71"]


#: A rollback does not reset a sequence, so each change is refused once.
REFUSE_ONCE = """
CREATE SEQUENCE refused;
CREATE FUNCTION refuse_once() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF nextval('refused') = 1 THEN RAISE EXCEPTION 'the other one won' USING ERRCODE = '{sqlstate}'; END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER refuse_once BEFORE {change} FOR EACH ROW EXECUTE FUNCTION refuse_once();
"""
FORGET = "DROP FUNCTION refuse_once CASCADE; DROP SEQUENCE refused"


@pytest.mark.failure_74
@pytest.mark.postgres
@pytest.mark.except_citus  # a distributed table can't have a trigger
@pytest.mark.parametrize("sqlstate", ["40001", "40P01", "55P03"])
@pytest.mark.parametrize("change", ["UPDATE ON idempotency_record", "INSERT ON idempotency_step"])
def test_a_change_that_lost_to_a_concurrent_transaction_is_retried(post, change, sqlstate):
    handler.before = lambda request: require_claim().step("pay", lambda: 71)
    with connection.cursor() as cursor:
        cursor.execute(REFUSE_ONCE.format(change=change, sqlstate=sqlstate))
        try:
            first = post("/again/")
        finally:
            cursor.execute(FORGET)
    assert first.status_code == 201
    assert is_replay(post("/again/"), first)
    assert (effects(), handler.attempts, IdempotencyStep.objects.count()) == (["one"], [1], 1)


@pytest.mark.failure_74
def test_an_outcome_is_recorded_once_a_peer_releases_the_record_lock(post, monkeypatch):
    gate = Gate()
    monkeypatch.setattr(ownership, "time", SimpleNamespace(sleep=lambda seconds: gate.open()))

    def hold():
        with transaction.atomic():
            IdempotencyRecord.objects.update(created_at=F("created_at"))
            gate.pass_through()

    with ExitStack() as stack:

        def be_locked(request):
            if connection.vendor == "sqlite":
                with connection.cursor() as cursor:
                    cursor.execute("PRAGMA busy_timeout = 50")  # instead of the settings' 20 s
                stack.callback(connection.close)
            stack.enter_context(held(hold, gate))

        handler.after = be_locked
        first = post("/again/")
    assert first.status_code == 201
    assert is_replay(post("/again/"), first)
    assert (effects(), handler.attempts) == (["one"], [1])


@pytest.mark.failure_74
def test_an_unreachable_server_leaves_the_claim_to_recovery(post, monkeypatch):
    tries = []
    monkeypatch.setattr(ownership, "complete", lambda *args: tries.append(1) or unreachable())
    monkeypatch.setattr(ownership, "FIRST_PAUSE", 0)
    handler.after = lambda request: monkeypatch.setattr(connection, "is_usable", lambda: False)
    assert problem(post("/park/")) == UNAVAILABLE
    assert len(tries) == ownership.MAX_TRIES
    assert state() == ("in_progress", ["one"])


def owned(in_transaction):
    operation = Operation.declare("tests.owned", transaction=in_transaction, recovery=REEXECUTE)
    return ownership.Ownership(
        operation.policy,
        Fence(Scope("a", operation.name, "k"), 1, 1, "v1:0"),
        store_for("default"),
        shares_connection=False,
    )


@pytest.mark.parametrize(
    ("in_transaction", "in_test_case", "dies", "tries"),
    [
        (True, False, True, 1),
        (False, True, True, 1),
        (False, False, False, 1),
        (False, False, True, ownership.MAX_TRIES),
    ],
)
def test_only_an_error_that_a_new_connection_may_cure_is_retried(
    post, monkeypatch, in_transaction, in_test_case, dies, tries
):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    attempt = replace(owned(in_transaction), shares_connection=in_test_case)
    connection.ensure_connection()
    made = []

    def change():
        made.append(1)
        if dies:  # and Django connects again by itself
            connection.close()
            connection.ensure_connection()
        raise DatabaseError

    with pytest.raises(DatabaseError):
        ownership.fenced_change(attempt, change)
    assert len(made) == tries
    assert pauses == [0.1, 0.2, 0.4, 0.8][: tries - 1]


def test_a_run_can_not_join_its_callers_transaction(post):
    with transaction.atomic(), pytest.raises(TransactionBrokenError, match="durable"), running(Claim(owned(True))):
        pass
