"""The server's side of the trouble: the sample project's WSGI application, made slow or killed at chosen points.

Neither the package nor the sample project know of it. A request asks for its own trouble in the header ``Demo-Fault``:
``pause=120`` works 120 ms longer after the charge is written; ``stall=protected/7=3000`` stands still there;
``kill_at_work=protected/7`` gets the worker killed at that point, and ``kill_at_reply=protected/7`` when everything is
committed and the answer is about to be sent.
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

#: The killer comes within milliseconds, or when a stalled request in the same worker goes on.
WAIT_FOR_THE_KILLER = 10.0

current = threading.local()
sample_project = get_wsgi_application()


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    current.fault = environ.get("HTTP_DEMO_FAULT", "").partition("=")
    try:
        response = sample_project(environ, start_response)
        kind, _, value = current.fault
        if kind == "kill_at_reply":
            ask_to_be_killed(value)
        return response
    finally:
        current.fault = None


def after_the_write(sender: type, **kwargs: Any) -> None:
    kind, _, value = getattr(current, "fault", None) or ("", "", "")
    if kind == "kill_at_work":
        ask_to_be_killed(value)
    elif kind == "pause":
        time.sleep(int(value) / 1000)
    elif kind == "stall":
        charge, _, milliseconds = value.partition("=")
        report("stalled", charge)
        time.sleep(int(milliseconds) / 1000)
        report("awake", charge)


def ask_to_be_killed(charge: str) -> None:
    report("kill", charge)
    time.sleep(WAIT_FOR_THE_KILLER)


def report(word: str, charge: str) -> None:
    side, _, number = charge.partition("/")
    # Short enough to be sent whole, so that the lines of many workers don't mix.
    gunicorn_conf.report.sendall(f"{word} {os.getpid()} {side} {int(number)}\n".encode())


for model in ("Charge", "UnprotectedCharge"):
    post_save.connect(after_the_write, sender=apps.get_model("testproject", model))
