"""``manage.py demo --lab``: the retry lab on a server whose workers may be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import webbrowser
from pathlib import Path
from types import FrameType

from testproject.harness.processes import Daemon, answers, free_port, short_directory

#: Seconds. A killed worker's claim is respected for this long, so a visitor need not wait for the default of a minute.
LEASE = 2

WORKERS = 2


def serve_lab(url: str, base: Path) -> None:
    """Migrate the database, serve the lab, and open it in a browser, until a Ctrl-C or a SIGTERM.

    :param url: the URL of the database.
    :param base: the directory of ``manage.py``.
    :raises ProcessError: the server does not start.
    """
    address = ("127.0.0.1", free_port())
    environment = {
        "DATABASE_URL": url,
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
        "ALLOWED_HOSTS": address[0],
        "IDEMPOTENCY_LEASE_SECONDS": str(LEASE),
        "LAB_KILLS": "true",
    }
    migrate = [sys.executable, str(base / "manage.py"), "migrate", "-v0"]
    subprocess.run(migrate, env={**os.environ, **environment}, check=True)
    server = [
        *(sys.executable, "-m", "gunicorn", "testproject.wsgi", "--chdir", str(base), "--log-level", "error"),
        *("--bind", f"{address[0]}:{address[1]}", "--graceful-timeout", "1"),
        *("--workers", str(WORKERS), "--worker-class", "gthread", "--threads", "16"),
    ]
    page = f"http://{address[0]}:{address[1]}/lab/"
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with (
            short_directory("lab-") as directory,
            Daemon("lab", server, directory, environment=environment, is_ready=lambda: answers(address)) as daemon,
        ):
            print(f"The retry lab is at {page} . Stop it with Ctrl-C.", flush=True)
            webbrowser.open(page)
            while daemon.alive:
                time.sleep(0.5)
    except KeyboardInterrupt:
        print("The server is stopped.")
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """A SIGTERM takes the way of a Ctrl-C, so that the server is stopped."""
    raise KeyboardInterrupt
