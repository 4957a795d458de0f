"""The roles of a forked process: work, relay or produce. A JSON specification defines each process's job."""

import json
import os
import sys
import time
from datetime import timedelta
from importlib import import_module
from pathlib import Path

from django.conf import settings
from django.db import connections, transaction

from idempotency import claim
from idempotency.contrib.celery import resend_lost_messages
from idempotency.operate.purge import purge_batches
from idempotency.outbox import publish
from idempotency.outbox.relay import relay_batches
from idempotency.protocol import faults
from testproject.celery import app
from testproject.harness.marks import Marks
from tests.delivery import names, tasks
from tests.harness.strikes import Strike, Strikes

#: The account of the producers' operations and of their messages.
ACCOUNT = "7"
ORDER = "delivery.order"
#: Seconds between two queries of a relay that found nothing due.
PAUSE = 0.02
#: Modules that every process needs. The zygote loads them once.
LOADED_ONCE = (
    *("celery.apps.worker", "celery.concurrency.prefork", "celery.worker.consumer"),
    *("kombu.transport.pyamqp", "kombu.transport.redis"),
)
for module in LOADED_ONCE:
    import_module(module)


def run(spec, channel):
    """Called in each fork: set its broker, arm its strikes, and run its job."""
    app.conf.update(
        broker_url=spec["broker"],
        task_default_queue=spec["queue"],
        broker_transport_options=spec["transport"],
        task_routes={"idempotency.contrib.celery.tasks.*": {"queue": names.NUDGES}},
    )
    settings.PROVIDER_URL = spec["provider"]
    if "lease" in spec:
        settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "LEASE": timedelta(seconds=spec["lease"])}
    strikes = tasks.strikes = Strikes(Marks(spec["marks"]), [Strike(**strike) for strike in spec["strikes"]])
    faults.fault_point["complete.committed"] = lambda: strikes.here("committed")
    for place in ("relay.claimed", "relay.published"):
        faults.fault_point[place] = strikes.each(place)
    report = ROLES[spec["role"]](spec, channel)
    if report is not None:
        channel.tell(event="done", **report)
    connections.close_all()


def work(spec, channel):
    """A Celery worker with a prefork pool. Runs until it is killed."""
    tasks.count_deliveries()
    worker = app.Worker(
        hostname=f"worker-{os.getpid()}@localhost",
        concurrency=spec.get("concurrency", 2),
        pool="prefork",
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        quiet=True,
    )
    worker.start()
    sys.exit(worker.exitcode)


def relay(spec, channel):
    """Relay until the harness requests the end and nothing is due. Returns how many messages were sent."""
    channel.tell(event="ready")
    channel.wait()
    sent = 0
    while True:
        for batch in relay_batches(batch_size=spec.get("batch_size", 100)):
            sent += batch.sent
        if channel.has_something():
            return {"sent": sent}
        time.sleep(PAUSE)  # a relay polls, because nothing notifies it of a new message


def produce(spec, channel):
    """Publish a message to each task for every number, each pair from a separate operation.

    Of ``rolled_back`` operations, every fourth is rolled back for good, and the next one is rolled back and retried.
    """
    passes = {0: [True], 1: [True, False]} if spec.get("rolled_back") else {}
    for number in range(*spec["numbers"]):
        for rolls_back in passes.get(number % 4, [False]):
            try:
                _order(spec, number, rolls_back)
            except RolledBackError:
                Marks(spec["marks"]).leave(f"rollback.{number}.{rolls_back}")
    return {}


class RolledBackError(Exception):
    """The operation fails after it has published."""


def _order(spec, number, rolls_back):
    label = f"{spec['name']}-{{}}-{number:05d}"
    with claim(ORDER, account_id=ACCOUNT, key=label.format("order"), payload=number) as run:
        publish(names.KEPT, {"label": label.format("kept")}, sender=spec["sender"])
        if spec.get("rolled_back"):
            # As without an outbox: the message leaves at once, regardless of the transaction.
            app.send_task(names.PLAIN, kwargs={"label": label.format("plain")})
        else:
            publish(names.PLAIN, {"label": label.format("plain")}, sender=spec["sender"])
        run.result = None
        if rolls_back:
            raise RolledBackError


def produce_late(spec, channel):
    """Publish, and hold the transaction open until released: the message has a low id and is committed late."""
    with transaction.atomic():
        message = publish(names.KEPT, {"label": spec["label"]}, sender=names.ONCE)
        channel.tell(event="written", id=message.pk)
        channel.wait()
    return {}


def call_tasks(spec, channel):
    """Publish without the outbox. The file ``calls`` lists each task's name, arguments and options."""
    for name, kwargs, options in json.loads(Path(spec["calls"]).read_text()):
        app.send_task(name, kwargs=kwargs, **options)
    return {}


def purge(spec, channel):
    """Delete all records that are past their retention."""
    return {"deleted": sum(batch.deleted for batch in purge_batches())}


def resend(spec, channel):
    """Send the messages again that never reached their consumer."""
    return {"found": resend_lost_messages(older_than=timedelta(0))}


ROLES = {
    "worker": work,
    "relay": relay,
    "producer": produce,
    "late producer": produce_late,
    "caller": call_tasks,
    "purger": purge,
    "resender": resend,
}
