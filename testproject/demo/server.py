"""The demo's gunicorn: its configuration, and the sample project's WSGI application, made slow or killed on request.

Neither the package nor the sample project know of it. A request asks for its own trouble in the header ``Demo-Fault``:
``pause=120`` works 120 ms longer after the charge is written; ``kill_at_work=protected.7`` kills the worker at that
point, and ``kill_at_reply=protected.7`` when everything is committed and the answer is about to be sent. A charge kills
one worker. A worker leaves the mark ``died.<pid>`` before it kills itself.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from django.core.wsgi import get_wsgi_application
from django.db.models import Model
from django.db.models.signals import post_save

from testproject.harness.strikes import Marks

# Gunicorn reads its settings from this module.
worker_class = "gthread"
threads = 16
# Forked workers start at once, so that a killed one is missed for milliseconds and not for the time Django takes.
preload_app = True
timeout = 30
graceful_timeout = 1
# A connection a request: the next one may reach any worker, as it would behind a load balancer.
keepalive = 0
control_socket_disable = True

current = threading.local()
sample_project = get_wsgi_application()

# Only now: models can be imported once Django is set up.
from testproject.celery import app as celery_app  # noqa: E402
from testproject.models import Charge, UnprotectedCharge  # noqa: E402

# Loaded before the workers are forked. Otherwise each would do it at its first order, and so would its successor.
celery_app.loader.import_default_modules()
celery_app.connection_for_write().transport_cls  # noqa: B018

marks = Marks(os.environ["DEMO_MARKS"])


def post_fork(server: Any, worker: Any) -> None:
    # One of all workers dies in DEMO_KILL_EVERY seconds, on average.
    mean = float(os.environ["DEMO_KILL_EVERY"]) * int(os.environ["DEMO_WORKERS"])
    if mean:
        threading.Thread(target=die_at_random, args=(mean,), daemon=True).start()


def die_at_random(mean: float) -> None:
    time.sleep(random.Random().expovariate(1 / mean))  # forks have the same state of the shared generator
    die()


def die() -> None:
    marks.leave(f"died.{os.getpid()}")
    os.kill(os.getpid(), signal.SIGKILL)


def die_for(charge: str) -> None:
    if marks.leave(f"struck.{charge}"):
        die()


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    current.fault = environ.get("HTTP_DEMO_FAULT", "").partition("=")
    try:
        response = sample_project(environ, start_response)
        kind, _, value = current.fault
        if kind == "kill_at_reply":
            die_for(value)
        return response
    finally:
        current.fault = None


def at_work(sender: type[Model], **kwargs: Any) -> None:
    kind, _, value = getattr(current, "fault", None) or ("", "", "")
    if kind == "kill_at_work":
        die_for(value)
    elif kind == "pause":
        time.sleep(int(value) / 1000)


for model in (Charge, UnprotectedCharge):
    post_save.connect(at_work, sender=model)
