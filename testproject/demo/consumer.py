"""``python -m testproject.demo.consumer worker`` or ``relay``: a Celery worker, or ``manage.py relay_outbox --watch``.

Each is what a deployment runs, and strikes itself as the demo has planned (``hop``). The sample project knows nothing
of it.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import django
from celery.signals import task_postrun, task_prerun
from django.core.management import call_command

from testproject.harness.redis import redelivering
from testproject.harness.strikes import Marks, Strikes, read

#: Short enough that what a killed relay or worker had in hand is there again in seconds, and long enough that nothing
#: that is alive is taken for dead. With the defaults of a minute and an hour the demo would mostly wait.
RELAY_LEASE = timedelta(seconds=1)
BROKER_BACKOFF = timedelta(seconds=1)
LOST_WAIT = 0.3  # seconds
VISIBILITY_TIMEOUT = 1  # seconds
LOOK_EVERY = 1  # seconds between two looks for what nobody has acknowledged

CONCURRENCY = 2
WATCH = 0.1  # seconds


class Child:
    """A child of the worker, which has one message at hand, or none that bears a label."""

    def __init__(self, strikes: Strikes) -> None:
        self.strikes = strikes

    def started(self, kwargs: dict[str, Any], **more: Any) -> None:
        self.strikes.label = kwargs.get("label", "")
        if self.strikes.label:
            self.strikes.marks.note("deliveries", self.strikes.label)
        self.strikes.here("started")

    def ended(self, state: str, **more: Any) -> None:
        """Its effects and its record are committed. Nobody has acknowledged it."""
        if state == "SUCCESS":
            self.strikes.here("ended")
        self.strikes.label = ""

    def replayed(self, **more: Any) -> None:
        if self.strikes.label:
            self.strikes.marks.note("replays", self.strikes.label)


def main() -> None:
    role = sys.argv[1]
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    django.setup()
    from idempotency import signals
    from idempotency.outbox import relay
    from idempotency.protocol import faults
    from testproject import tasks
    from testproject.celery import app

    strikes = Strikes(Marks(os.environ["DEMO_MARKS"]), read(os.environ["DEMO_STRIKES"]))
    relay.LEASE, relay.UNAVAILABLE_BACKOFF = RELAY_LEASE, BROKER_BACKOFF
    if role == "relay":
        # The worst place: the broker has confirmed a message, and nothing is marked.
        faults.fault_point["relay.published"] = strikes.each("relay.published")
        call_command("relay_outbox", watch=WATCH)
        return
    child = Child(strikes)
    task_prerun.connect(child.started, weak=False)
    task_postrun.connect(child.ended, weak=False)
    signals.replayed.connect(child.replayed, weak=False)
    # The effect and its record are written, and not committed.
    faults.fault_point["complete.sent"] = lambda: strikes.here("at_work")
    tasks.send_receipt_unprotected.acks_late = False  # as Celery does by default
    app.conf.worker_lost_wait = LOST_WAIT
    app.conf.broker_transport_options = redelivering(VISIBILITY_TIMEOUT, look_every=LOOK_EVERY)
    options = ["--concurrency", str(CONCURRENCY), "--without-gossip", "--without-mingle", "--without-heartbeat"]
    app.worker_main(["worker", "--pool", "prefork", "--loglevel", "WARNING", *options])


if __name__ == "__main__":
    main()
