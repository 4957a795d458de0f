"""The demo's gunicorn configuration, and the sample project's WSGI application with faults on request.

Neither the package nor the sample project depends on this module. A request selects its fault in the header
``Demo-Fault``. ``pause=120`` sleeps for 120 ms after the charge is written. ``kill_at_work=LABEL`` kills the worker at
that point, and ``kill_at_reply=LABEL`` after the commit, before the response is sent. A charge kills only one worker,
which leaves the mark ``died.LABEL`` first.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from django.core.wsgi import get_wsgi_application
from django.db.models.signals import post_save

from testproject.harness.marks import Marks

# Gunicorn reads its settings from this module.
worker_class = "gthread"
threads = 16
# Forked workers start within milliseconds, because Django is already imported.
preload_app = True
timeout = 30
graceful_timeout = 1
# One connection per request, so that a retry may reach any worker, as behind a load balancer.
keepalive = 0
control_socket_disable = True

current = threading.local()
sample_project = get_wsgi_application()

# Imported here, because get_wsgi_application() sets up Django.
from testproject.celery import app as celery_app  # noqa: E402
from testproject.models import Charge, UnprotectedCharge  # noqa: E402

# Loaded before the fork. Otherwise each worker, and each replacement, would load them at its first order.
celery_app.loader.import_default_modules()
celery_app.connection_for_write().transport_cls  # noqa: B018

marks = Marks(os.environ["DEMO_MARKS"])


def meet(place: str) -> None:
    """Trigger the current request's fault if it belongs to this place."""
    kind, _, value = getattr(current, "fault", ("", "", ""))
    if kind == place == "pause":
        time.sleep(int(value) / 1000)
    elif kind == place and marks.leave(f"died.{value}"):
        os.kill(os.getpid(), signal.SIGKILL)


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    current.fault = environ.get("HTTP_DEMO_FAULT", "").partition("=")
    response = sample_project(environ, start_response)
    meet("kill_at_reply")
    return response


def work(**kwargs: Any) -> None:
    meet("pause")
    meet("kill_at_work")


for model in (Charge, UnprotectedCharge):
    post_save.connect(work, sender=model)
