"""The server's side of the trouble: the sample project's WSGI application, made slow or killed at chosen points.

Neither the package nor the sample project know of it. A request asks for its own trouble in the header ``Demo-Fault``:
``pause=120`` works 120 ms longer after the charge is written; ``stall=protected/7=2`` stands still there until its
lease of 2 s is over and another has done its work; ``kill_at_work=protected/7`` gets the worker killed at that point,
and ``kill_at_reply=protected/7`` when everything is committed and the answer is about to be sent. For a payout
``pause`` and ``kill_at_work`` come when the provider has paid and nothing of it is written here.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from django.core.wsgi import get_wsgi_application
from django.db import connection
from django.db.models import Model
from django.db.models.signals import post_save, pre_save

from .gunicorn_conf import report

#: The killer comes within milliseconds, or when a stalled request in the same worker goes on.
WAIT_FOR_THE_KILLER = 10.0

#: A stalled request goes on when another has done its work, or so many seconds after the end of its lease; sooner where
#: no other can.
WAIT_FOR_THE_WINNER = 8.0
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


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    current.environ = environ
    current.fault = environ.get("HTTP_DEMO_FAULT", "").partition("=")
    try:
        response = sample_project(environ, start_response)
        kind, _, value = current.fault
        if kind == "kill_at_reply":
            ask_to_be_killed(value)
        return response
    finally:
        current.environ = current.fault = None


def after_the_write(sender: type[Model], instance: Any, **kwargs: Any) -> None:
    kind, _, value = getattr(current, "fault", None) or ("", "", "")
    if kind == "kill_at_work":
        ask_to_be_killed(value)
    elif kind == "pause":
        time.sleep(int(value) / 1000)
    elif kind == "stall":
        charge, _, lease = value.partition("=")
        report("stalled", os.getpid(), charge)
        current.environ["demo.stalled"] = charge  # gunicorn_conf reports the end, when the answer is sent
        stand_still(instance, float(lease))


def after_the_provider(sender: type[Model], **kwargs: Any) -> None:
    kind, _, value = getattr(current, "fault", None) or ("", "", "")
    if kind == "kill_at_work":
        ask_to_be_killed(value)
    elif kind == "pause":
        time.sleep(int(value) / 1000)


def after_a_recovery(sender: Operation, status: str, **kwargs: Any) -> None:
    if sender.recovery is Recovery.RECONCILE and status == Status.COMPLETED:
        report("reconciled", os.getpid(), "reconcile")


def stand_still(instance: Any, lease: float) -> None:
    """Sleep past the lease, until another attempt has done the work of this one."""
    # Without a record there is nothing to wait for; and with SQLite, where one writes at a time, nobody to do it.
    fenced = isinstance(instance, Charge) and connection.vendor != "sqlite"
    deadline = time.monotonic() + lease + (WAIT_FOR_THE_WINNER if fenced else AFTER_THE_LEASE)
    # Read within this request's open transaction: it sees what others commit meanwhile.
    records = IdempotencyRecord.objects.filter(
        account_id=str(instance.account_id),
        idempotency_key=current.environ["HTTP_IDEMPOTENCY_KEY"],
        status=Status.COMPLETED,
    )
    while time.monotonic() < deadline and not (fenced and records.exists()):
        time.sleep(LOOK_EVERY)


def ask_to_be_killed(charge: str) -> None:
    report("kill", os.getpid(), charge)
    time.sleep(WAIT_FOR_THE_KILLER)


post_save.connect(after_the_write, sender=Charge)
post_save.connect(after_the_write, sender=UnprotectedCharge)
pre_save.connect(after_the_provider, sender=Payout)
pre_save.connect(after_the_provider, sender=UnprotectedPayout)
recovered.connect(after_a_recovery)
