"""The orders and exports of the sample project: a committed order is published, and one key runs one job."""

import json
import sys

import pytest
from django.conf import settings

from idempotency.contrib.celery import send
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.outbox.models import MessageStatus, OutboxMessage
from testproject.celery import app
from testproject.exports import TASK
from testproject.harness.processes import Daemon
from testproject.harness.redis import running_redis
from testproject.models import Charge, Export
from testproject.tasks import run_export
from tests.concurrency.racing import race
from tests.database import processes
from tests.factories import UserFactory
from tests.harness.servers import skip_without_redis
from tests.http.callers import Caller
from tests.providers import eventually
from tests.records import abandon

# The sample's code doesn't depend on the database.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]

ORDER = {"amount": 1234, "label": "order-1"}


#: No server listens on this port.
NO_BROKER = "amqp://guest:guest@127.0.0.1:1//"


class Customer(Caller):
    """A client that orders and exports its charges."""

    def __init__(self, *amounts):
        super().__init__(UserFactory())
        self.charge(*amounts)

    def order(self, path="/orders/", key="k", **changes):
        return self.post(path, {**ORDER, **changes}, key=key)

    def charge(self, *amounts):
        Charge.objects.bulk_create(Charge(account=self.user, amount=amount, currency="usd") for amount in amounts)

    def export(self, key="k"):
        return self.post("/exports/", {"label": "march"}, key=key)


@pytest.fixture(autouse=True)
def _no_broker(monkeypatch):
    """Messages stay in the outbox, and no request connects to a broker."""
    monkeypatch.setenv("CELERY_BROKER_URL", NO_BROKER)
    monkeypatch.setattr(send, "_quiet_until", float("inf"))


def published():
    assert set(OutboxMessage.objects.values_list("status", flat=True)) <= {MessageStatus.PENDING}
    messages = OutboxMessage.objects.order_by("pk").values_list("topic", "payload")
    return [(topic.rpartition(".")[2], json.loads(payload)) for topic, payload in messages]


def test_an_order_makes_a_charge_and_a_message():
    answer = Customer().order()
    charge = Charge.objects.get()
    assert (answer.status_code, answer.json()) == (201, {"id": charge.pk, **ORDER})
    assert published() == [("send_receipt", ORDER)]
    trace = IdempotencyRecord.objects.get().scope.trace
    assert {message.idempotency_key.partition(".")[0] for message in OutboxMessage.objects.all()} == {trace}


def test_a_declined_order_leaves_nothing_and_its_402_is_replayed():
    buyer = Customer()
    first, second = buyer.order(source="declined"), buyer.order(source="declined")
    assert (first.status_code, second.status_code, second["Idempotency-Replayed"]) == (402, 402, "true")
    assert first.content == second.content
    assert (Charge.objects.count(), published()) == (0, [])


# Exports: duplicates attach to the job, and only its owner can read it


def run_job():
    """Run the one message's job in this process."""
    message = OutboxMessage.objects.get()
    assert message.topic == TASK
    headers = {"idempotency_key": message.idempotency_key, "idempotency_account": message.account_id}
    ran = run_export.apply(kwargs=json.loads(message.payload), task_id=str(message.message_id), headers=headers)
    return ran.get()


def test_duplicates_of_an_export_return_its_job_until_it_has_an_outcome():
    alice, bob = Customer(700, 42), Customer(5)
    for _ in range(3):
        answer = alice.export()
        assert (answer.status_code, "Idempotency-Replayed" in answer) == (202, False)
        assert int(answer["Retry-After"]) >= 1
        export = Export.objects.get()
        assert answer["Location"] == f"/exports/{export.pk}/"
        assert answer.json() == {"id": str(export.pk), "label": "march", "state": "running"}
    location = answer["Location"]
    assert alice.get(location).json() == answer.json()
    assert [caller.get(location).status_code for caller in (alice, bob, Caller(None))] == [202, 404, 401]
    assert run_job() == {"charges": 2, "total": 742}
    outcome = {"id": location.split("/")[2], "label": "march", "state": "finished", "charges": 2, "total": 742}
    for _ in range(2):
        duplicate = alice.export()
        assert (duplicate.status_code, duplicate["Idempotency-Replayed"]) == (200, "true")
        assert duplicate.json() == outcome
        assert "Retry-After" not in duplicate
    assert alice.get(location).json() == outcome
    assert [caller.get(location).status_code for caller in (bob, Caller(None))] == [404, 401]
    assert OutboxMessage.objects.count() == 1


def test_the_job_takes_effect_once_if_its_message_is_delivered_twice():
    alice = Customer(700, 42)
    alice.export()
    first = run_job()
    alice.charge(1)  # would show in a second run
    assert run_job() == first
    assert Export.objects.get().runs == 1
    consumed = IdempotencyRecord.objects.get(operation="exports.run")
    assert (consumed.status, consumed.attempt) == (Status.COMPLETED, 1)
    assert consumed.account_id == str(alice.user.pk)
    requested = IdempotencyRecord.objects.get(operation="exports.create")
    assert consumed.scope.trace == requested.scope.trace


#: The status of two abandoned claims each after a sweep. A worker knows the operations of its tasks and of
#: ``operations.py``, but not those that a view declares.
SWEPT = {"receipts.send": "recoverable", "payouts.park": "parked", "charges.create": "in_progress"}


@pytest.mark.scenario_29
def test_a_worker_runs_an_export_once_and_recovers_known_operations(tmp_path, monkeypatch):
    skip_without_redis()
    alice, _ = Customer(700, 42), Customer(5)
    # Requested while there is no broker: its message waits in the outbox.
    alice.export(key="early")
    with running_redis() as redis:
        monkeypatch.setenv("CELERY_BROKER_URL", redis.url)
        monkeypatch.setattr(send, "_quiet_until", float("-inf"))
        environment = {
            **processes.environment(),
            "PYTHONPATH": str(settings.BASE_DIR),
            "BROKER_URL": redis.url,
            "CELERY_BROKER_URL": redis.url,
            "CELERY_SKIP_CHECKS": "true",  # the checks load every view, and have already run
        }
        command = [sys.executable, "-m", "celery", "--app", "testproject", "worker", "--concurrency", "1"]
        command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        with Daemon("worker", command, tmp_path, environment=environment) as worker:
            locations = {answer["Location"] for answer in race([lambda: alice.export(key="late")] * 4)}
            assert eventually(lambda: {alice.export(key=key).status_code for key in ("early", "late")} == {200}), (
                worker.log_tail(100)
            )
            for operation in SWEPT:
                abandon(2, operation)
            with app.connection_for_write(redis.url) as connection:  # by its name, like a schedule
                app.send_task("idempotency.contrib.celery.tasks.recover_expired_leases", connection=connection)
            swept = IdempotencyRecord.objects.filter(operation__in=SWEPT).values_list("operation", "status")
            assert eventually(lambda: sorted(swept.all()) == sorted([*SWEPT.items()] * 2)), worker.log_tail(100)
            skipped = "2 abandoned claim(s) of operation 'charges.create' were skipped"
            assert eventually(lambda: skipped in worker.log.read_text())
    assert len(locations) == 1
    for key in ("early", "late"):
        ended = alice.export(key=key)
        assert (ended.status_code, ended["Idempotency-Replayed"]) == (200, "true")
        assert (ended.json()["charges"], ended.json()["total"]) == (2, 742)
    assert set(Export.objects.values_list("runs", flat=True)) == {1}
    assert set(OutboxMessage.objects.values_list("status", flat=True)) == {MessageStatus.SENT}
