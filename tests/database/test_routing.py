"""A project's router may place records in different databases, by operation or by account."""

from uuid import uuid4

import pytest
from django.core.management import call_command
from django.db import connections, transaction
from django.http import HttpResponse
from django.test import RequestFactory, override_settings
from django.utils.connection import ConnectionDoesNotExist

from idempotency import PARK, REEXECUTE, Operation, claim, idempotent
from idempotency.accounts import Fixed
from idempotency.bodies import BODY_GONE
from idempotency.contrib.dashboard.counting import write_counts
from idempotency.contrib.dashboard.models import IdempotencyCounter
from idempotency.exceptions import InProgressError
from idempotency.http.key_status import key_statuses
from idempotency.identity.scope import Scope
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.operate.purge import purge_batches, purge_body_batches
from idempotency.operate.resolutions import mark_not_executed
from idempotency.operate.statistics import stats
from idempotency.operate.sweep import recover_batches
from idempotency.outbox import publish
from idempotency.outbox.models import OutboxMessage
from idempotency.outbox.publishing import insert_message
from idempotency.outcome import Outcome
from idempotency.protocol.claim_request import ClaimRequest
from idempotency.protocol.waiting import acquire_or_wait
from tests.aliases import added
from tests.database.claiming import PAYLOAD, acquire, asks
from tests.outbox import SENDER
from tests.records import MINUTE, from_now

pytestmark = [pytest.mark.django_db(transaction=True)]

invoices = Operation.declare("tests.routing.invoices", transaction=False, recovery=PARK)
refunds = Operation.declare("tests.routing.refunds", account=Fixed("near"))
ELSEWHERE = "elsewhere"


class Router:
    def db_for_read(self, model, **hints):
        # There is no such database, so any read that follows the router fails.
        return "replica" if model._meta.app_label.startswith("idempotency") else None

    def db_for_write(self, model, **hints):
        leads_there = hints.get("operation") in {invoices.name, refunds.name} or hints.get("account_id") == "far"
        return ELSEWHERE if model._meta.app_label == "idempotency" and leads_there else None


@pytest.fixture(autouse=True)
def _elsewhere(transactional_db, tmp_path, monkeypatch):
    file = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "elsewhere.sqlite3")}
    options = {"OPTIONS": {"transaction_mode": "IMMEDIATE"}}
    with added(monkeypatch, ELSEWHERE, connections.settings["default"] | file | options):
        call_command("migrate", "idempotency", database=ELSEWHERE, verbosity=0)
        with override_settings(DATABASE_ROUTERS=[Router()]):
            yield


def kept(using):
    return list(IdempotencyRecord.objects.using(using).order_by("id").values_list("account_id", "status"))


def test_a_record_stays_in_the_database_of_its_operation_or_account():
    for _ in range(2):
        for operation, account_id in ((invoices, "near"), ("tests.routing.charges", "far"), ("charges", "near")):
            with claim(operation, account_id=account_id, key="k") as run:
                if not run.replayed:
                    run.result = account_id
                    assert connections[ELSEWHERE].in_atomic_block is (account_id == "far")
            assert run.result == account_id

    assert kept(ELSEWHERE) == [("near", Status.COMPLETED), ("far", Status.COMPLETED)]
    assert kept("default") == [("near", Status.COMPLETED)]
    near = [Scope("near", name, "k") for name in (invoices.name, "charges", "tests.routing.none")]
    far = [Scope("far", "tests.routing.charges", "k"), Scope("far", "tests.routing.charges", "another")]
    statuses = [key_statuses(dict.fromkeys(scopes, invoices.policy)) for scopes in (near, far)]
    completed = [{scope: status.status for scope, status in found.items()} for found in statuses]
    assert completed == [dict.fromkeys(near[:2], "completed"), {far[0]: "completed"}]


def test_a_claim_is_swept_and_resolved_in_its_database():
    with claim(invoices, account_id="near", key="k") as run:
        run.result = None
    elsewhere = IdempotencyRecord.objects.using(ELSEWHERE)
    elsewhere.update(status=Status.IN_PROGRESS, lease_expires_at=from_now(-MINUTE))

    assert next(recover_batches()).touched == 0
    assert next(recover_batches(using=ELSEWHERE)).touched == 1

    assert kept(ELSEWHERE) == [("near", Status.PARKED)]
    mark_not_executed(elsewhere.get(), by="ops", reason="seen")
    assert kept(ELSEWHERE) == [("near", Status.RECOVERABLE)]


def test_steps_are_written_read_and_deleted_in_their_records_database():
    ran = []

    def attempt(name):
        with claim("tests.routing.steps", account_id="far", key="k", transaction=False, recovery=REEXECUTE) as run:
            run.claim.step("one", lambda: ran.append(name))
            run.claim.renew()
            assert name != "fails"

    with pytest.raises(AssertionError):
        attempt("fails")
    attempt("skips it")
    assert (IdempotencyStep.objects.using(ELSEWHERE).count(), IdempotencyStep.objects.using("default").count()) == (
        1,
        0,
    )
    IdempotencyRecord.objects.using(ELSEWHERE).update(expires_at=from_now(-MINUTE))
    attempt("starts over")
    assert ran == ["fails", "starts over"]
    records = IdempotencyRecord.objects.using(ELSEWHERE)
    records.update(body_expires_at=from_now(-MINUTE))
    assert next(purge_body_batches(using=ELSEWHERE)).deleted == 1
    assert (records.get().response_body, IdempotencyStep.objects.using(ELSEWHERE).count()) == (BODY_GONE, 0)
    records.update(expires_at=from_now(-MINUTE))
    assert (next(purge_batches()).deleted, next(purge_batches(using=ELSEWHERE, batch_size=1)).deleted) == (0, 1)


@pytest.mark.failure_14
@pytest.mark.failure_28
def test_nothing_about_a_record_is_read_from_a_replica():
    with pytest.raises(ConnectionDoesNotExist):
        IdempotencyRecord.objects.count()
    abandoned = acquire(asks)
    with pytest.raises(InProgressError):
        acquire(asks)
    with transaction.atomic():  # the refused claim has left the connection unchanged
        publish("orders.placed", 1, sender=SENDER)
    IdempotencyRecord.objects.using("default").update(lease_expires_at=from_now(-MINUTE))
    assert isinstance(acquire_or_wait(ClaimRequest(asks.policy, abandoned.scope, PAYLOAD)), Outcome)
    assert (next(purge_batches()).deleted, stats().records.value) == (0, 1)


def test_messages_and_counters_are_written_to_the_database_of_their_store():
    for app in ("idempotency_outbox", "idempotency_dashboard"):
        call_command("migrate", app, database=ELSEWHERE, verbosity=0)
    made = {"message_id": uuid4(), "idempotency_key": "k", "topic": "orders.placed", "sender": SENDER, "payload": "1"}
    for using, count in ((ELSEWHERE, 1), ("default", 2)):
        with transaction.atomic(using=using):
            assert [insert_message(using, OutboxMessage(**made), MINUTE) for _ in range(2)] == [True, False]
        write_counts(using, {("orders.create", "claimed"): count}, 7)
        assert OutboxMessage.objects.using(using).count() == 1
        assert {*IdempotencyCounter.objects.using(using).values_list("hour", "total")} == {(0, count), (7, count)}


def test_an_attempt_without_an_outcome_is_rolled_back_in_its_database():
    view = idempotent(refunds)(lambda request: HttpResponse(status=503))
    assert view(RequestFactory().post("/", headers={"Idempotency-Key": "k"})).status_code == 503
    assert kept(ELSEWHERE) == [("near", Status.RECOVERABLE)]


@pytest.mark.failure_76
@pytest.mark.parametrize(
    ("operation", "account", "status"),
    [(refunds, "near", 500), (Operation.declare("tests.routing.part", account=Fixed("far")), "far", 201)],
)
def test_a_call_does_not_join_a_transaction_in_another_database(operation, account, status):
    """The transaction would not include its effects, and a separate claim is impossible in an open transaction."""
    inner = idempotent(operation)(lambda request: HttpResponse(status=201))
    answers = []

    @idempotent(f"tests.routing.{account}", account=Fixed(account))
    def outer(request):
        answers.append(inner(request).status_code)
        return HttpResponse(status=201)

    request = RequestFactory().post("/", headers={"Idempotency-Key": "k"})
    assert outer(request).status_code == 201
    assert answers == [status]
    assert [len(kept(using)) for using in ("default", ELSEWHERE)] == ([1, 0] if account == "near" else [0, 1])
