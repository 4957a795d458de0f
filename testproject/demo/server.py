"""The demo's gunicorn: its configuration, and the sample project's WSGI application, made slow or killed on request.

Neither the package nor the sample project know of it. A request asks for its own trouble in the header ``Demo-Fault``:
``pause=120`` works 120 ms longer after the charge is written; ``stall=protected.7`` stands still there until its lease
is over and another has done its work; ``kill_at_work=protected.7`` kills the worker at that point, and
``kill_at_reply=protected.7`` when everything is committed and the answer is about to be sent. For a payout ``pause``
and ``kill_at_work`` come when the provider has paid and nothing of it is written here.

A worker leaves the mark ``met.protected.7`` when the trouble has come about, and ``died.<pid>`` before it kills itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from django.conf import settings as django_settings
from django.core.wsgi import get_wsgi_application
from django.db import connection
from django.db.models import Model
from django.db.models.signals import post_save, pre_save

from testproject.harness.strikes import Marks

from .life import Life

# Gunicorn reads its settings from this module.
worker_class = "gthread"
# Enough that those who stand still don't keep the others from work.
threads = 16
# Forked workers start at once, so that a killed one is missed for milliseconds and not for the time Django takes.
preload_app = True
timeout = 30
graceful_timeout = 1
# A connection a request: the next one may reach any worker, as it would behind a load balancer.
keepalive = 0
control_socket_disable = True

#: A stalled request goes on when another has done its work, or so many seconds after the end of its lease; sooner where
#: no other can.
WAIT_FOR_THE_WINNER = 20.0
AFTER_THE_LEASE = 0.5
LOOK_EVERY = 0.05

current = threading.local()
sample_project = get_wsgi_application()

# Only now: models can be imported once Django is set up.
from idempotency import Operation  # noqa: E402
from idempotency.lifecycle import Recovery, Status  # noqa: E402
from idempotency.models import IdempotencyRecord  # noqa: E402
from idempotency.signals import recovered  # noqa: E402
from testproject.celery import app as celery_app  # noqa: E402
from testproject.models import Charge, Payout, UnprotectedCharge, UnprotectedPayout  # noqa: E402

# Loaded before the workers are forked. Otherwise each would do it at its first order, and so would its successor.
celery_app.loader.import_default_modules()
celery_app.connection_for_write().transport_cls  # noqa: B018

life = Life(Marks(os.environ["DEMO_MARKS"]))


def post_fork(server: Any, worker: Any) -> None:
    # One of all workers dies in DEMO_KILL_EVERY seconds, on average.
    mean = float(os.environ["DEMO_KILL_EVERY"]) * int(os.environ["DEMO_WORKERS"])
    threading.Thread(target=life.end_at_random, args=(mean,), daemon=True).start()


def post_request(worker: Any, request: Any, environ: dict[str, Any], response: Any) -> None:
    if "demo.stalled" in environ:
        life.go_on()


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    current.environ = environ
    current.fault = environ.get("HTTP_DEMO_FAULT", "").partition("=")
    try:
        response = sample_project(environ, start_response)
        kind, _, value = current.fault
        if kind == "kill_at_reply":
            life.end(value)
        return response
    finally:
        current.environ = current.fault = None


def at_work(sender: type[Model], instance: Any, **kwargs: Any) -> None:
    kind, _, value = getattr(current, "fault", None) or ("", "", "")
    if kind == "kill_at_work":
        life.end(value)
    elif kind == "pause":
        time.sleep(int(value) / 1000)
    elif kind == "stall":
        current.environ["demo.stalled"] = value
        life.stand(value)
        stand_still(instance)


def stand_still(instance: Any) -> None:
    """Sleep past the lease, until another attempt has done the work of this one."""
    # Without a record there is nothing to wait for; and with SQLite, where one writes at a time, nobody to do it.
    fenced = isinstance(instance, Charge) and connection.vendor != "sqlite"
    lease = django_settings.IDEMPOTENCY["LEASE"].total_seconds()
    deadline = time.monotonic() + lease + (WAIT_FOR_THE_WINNER if fenced else AFTER_THE_LEASE)
    # Read within this request's open transaction: it sees what others commit meanwhile.
    records = IdempotencyRecord.objects.filter(
        account_id=str(instance.account_id),
        idempotency_key=current.environ["HTTP_IDEMPOTENCY_KEY"],
        status=Status.COMPLETED,
    )
    while time.monotonic() < deadline and not (fenced and records.exists()):
        time.sleep(LOOK_EVERY)


def after_a_recovery(sender: Operation, status: str, **kwargs: Any) -> None:
    if sender.recovery is Recovery.RECONCILE and status == Status.COMPLETED:
        life.marks.note("reconciled", str(os.getpid()))


for charge in (Charge, UnprotectedCharge):
    post_save.connect(at_work, sender=charge)
for payout in (Payout, UnprotectedPayout):
    pre_save.connect(at_work, sender=payout)
recovered.connect(after_a_recovery)
