"""``python -m testproject.demo.consumer worker`` or ``relay``: a Celery worker, or ``manage.py relay_outbox --watch``.

As in a deployment, except for shorter waits. The sample project does not depend on this module.
"""

import sys
import time
from datetime import timedelta
from typing import Any

import django
from django.core.management import call_command
from django.db.models.signals import post_save

from testproject.harness.redis import redelivering

#: Short enough that a killed relay's or worker's messages are redelivered within seconds, and long enough that no live
#: process is taken for dead. With the defaults of a minute and an hour, the demo would mostly wait.
RELAY_LEASE = timedelta(seconds=1)
BROKER_BACKOFF = timedelta(seconds=1)
VISIBILITY_TIMEOUT = 1  # seconds
#: Seconds per receipt: long enough that a worker is usually killed while it sends one.
WORK = 0.05


def work(**kwargs: Any) -> None:
    time.sleep(WORK)


def main() -> None:
    django.setup()
    from idempotency.outbox import relay
    from testproject import tasks
    from testproject.celery import app
    from testproject.models import Receipt, UnprotectedReceipt

    relay.LEASE, relay.UNAVAILABLE_BACKOFF = RELAY_LEASE, BROKER_BACKOFF
    if sys.argv[1] == "relay":
        call_command("relay_outbox", watch=0.1)
        return
    for model in (Receipt, UnprotectedReceipt):
        post_save.connect(work, sender=model)
    tasks.send_receipt_unprotected.acks_late = False  # Celery's default
    app.conf.broker_transport_options = redelivering(VISIBILITY_TIMEOUT, look_every=1)
    options = ["--concurrency", "2", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    app.worker_main(["worker", "--pool", "prefork", "--loglevel", "WARNING", *options])


if __name__ == "__main__":
    main()
