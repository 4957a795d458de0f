"""``python -m testproject.demo.consumer worker`` or ``relay``: a Celery worker, or ``manage.py relay_outbox --watch``.

Each is what a deployment runs, and tells the demo how far it is with each message: it stops at a few places until the
demo, at the other end of a socket, says "go", or kills it there (``killer``). The sample project knows nothing of it.
"""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from typing import Any, BinaryIO

import django
from celery.signals import task_postrun, task_prerun
from django.core.management import call_command

#: Short enough that what a killed relay or worker had in hand is there again in seconds, and long enough that nothing
#: that is alive is taken for dead. With the defaults of a minute and an hour the demo would mostly wait.
RELAY_LEASE = timedelta(seconds=1)
BROKER_BACKOFF = timedelta(seconds=1)
LOST_WAIT = 0.3  # seconds
VISIBILITY_TIMEOUT = 1  # seconds
LOOK_EVERY = 1  # seconds between two looks for what nobody has acknowledged

CONCURRENCY = 2
WATCH = 0.1  # seconds

GO = b"go\n"


class Line:
    """The connection to the demo. Each process has one of its own, also after a fork."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._pid = 0
        self._file: BinaryIO | None = None

    def ask(self, place: str, *words: str) -> None:
        """Say where this process is, and wait there until it may go on."""
        pid = os.getpid()
        try:
            if self._file is None or self._pid != pid:
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(os.environ["DEMO_KILLER"])
                self._file, self._pid = connection.makefile("rwb", buffering=0), pid  # type: ignore[assignment]
            assert self._file is not None
            self._file.write(" ".join([self._role, str(pid), place, *words]).encode("ascii") + b"\n")
            answer = self._file.readline()
        except OSError:
            answer = b""
        if answer != GO:
            os._exit(1)  # the demo is gone, and this process with it


class Message:
    """What a child of the worker has at hand: nothing, or one message that bears a label."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._words: tuple[str, ...] = ()

    def started(self, task_id: str, task: Any, kwargs: dict[str, Any], **more: Any) -> None:
        self._words = (task.name, str(kwargs["label"]), task_id) if "label" in kwargs else ()
        self.report("started")

    def ended(self, state: str, **more: Any) -> None:
        """Its effects and its record are committed. Nobody has acknowledged it."""
        if state == "SUCCESS":
            self.report("ended")
        self._words = ()

    def replayed(self, **more: Any) -> None:
        self.report("replayed")

    def report(self, place: str) -> None:
        if self._words:
            self._line.ask(place, *self._words)


def main() -> None:
    role = sys.argv[1]
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    django.setup()
    from idempotency import signals
    from idempotency.outbox import relay
    from idempotency.protocol import faults
    from testproject import tasks
    from testproject.celery import app

    line = Line(role)
    relay.LEASE, relay.UNAVAILABLE_BACKOFF = RELAY_LEASE, BROKER_BACKOFF
    # The worst place: the broker has confirmed a message, and nothing is marked.
    faults.armed["relay.published"] = lambda: line.ask("relayed")
    if role == "relay":
        call_command("relay_outbox", watch=WATCH)
        return
    message = Message(line)
    task_prerun.connect(message.started, weak=False)
    task_postrun.connect(message.ended, weak=False)
    signals.replayed.connect(message.replayed, weak=False)
    # The effect is there, or is written; its record says so; nothing of that is committed.
    faults.armed["complete.sent"] = lambda: message.report("at_work")
    # As Celery does by default. The other control's message is acknowledged when it is done with.
    tasks.pay_fee_unprotected.acks_late = False
    app.conf.worker_lost_wait = LOST_WAIT
    app.conf.broker_transport_options = {
        "visibility_timeout": VISIBILITY_TIMEOUT,
        "unacked_restore_interval": LOOK_EVERY,
        "unacked_restore_throttle": 1,
    }
    options = ["--concurrency", str(CONCURRENCY), "--without-gossip", "--without-mingle", "--without-heartbeat"]
    app.worker_main(["worker", "--pool", "prefork", "--loglevel", "WARNING", *options])


if __name__ == "__main__":
    main()
