"""The server's side of the trouble: the sample project's WSGI application, made slow or killed at chosen points.

Neither the package nor the sample project know of it. A request asks for its own trouble in the header ``Demo-Fault``:
``pause=120`` works 120 ms longer after the charge is written, ``kill=work`` gets the worker killed at that point, and
``kill=reply`` when everything is committed and the answer is about to be sent.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from django.apps import apps
from django.core.wsgi import get_wsgi_application
from django.db.models.signals import post_save

from . import gunicorn_conf

#: The killer answers within milliseconds. If it doesn't, the request goes on and the run reports a missing kill.
WAIT_FOR_THE_KILLER = 10.0

current = threading.local()
sample_project = get_wsgi_application()


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    kind, _, value = environ.get("HTTP_DEMO_FAULT", "").partition("=")
    current.fault = (kind, value)
    current.side = "unprotected" if environ.get("PATH_INFO", "").startswith("/unprotected/") else "protected"
    try:
        response = sample_project(environ, start_response)
        if (kind, value) == ("kill", "reply"):
            ask_to_be_killed()
        return response
    finally:
        current.fault = None


def after_the_write(sender: type, **_: Any) -> None:
    fault = getattr(current, "fault", None)
    if fault is None:
        return
    kind, value = fault
    if (kind, value) == ("kill", "work"):
        ask_to_be_killed()
    elif kind == "pause":
        time.sleep(int(value) / 1000)


def ask_to_be_killed() -> None:
    gunicorn_conf.report.sendall(f"fault {os.getpid()} {current.side}\n".encode())
    time.sleep(WAIT_FOR_THE_KILLER)


for model in ("Charge", "UnprotectedCharge"):
    post_save.connect(after_the_write, sender=apps.get_model("testproject", model))
