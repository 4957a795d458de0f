"""The demo's gunicorn: how its workers report themselves, and how they end when the demo is gone.

The demo hands over one end of a socket pair. What is written to it is read by ``workers``. Nothing ever comes from
the demo's end, until it closes: then the demo is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from typing import Any

worker_class = "gthread"
# Enough that those who stand still, or wait for the killer, don't keep the others from work.
threads = 16
# Forked workers start at once, so that a killed one is missed for milliseconds and not for the time Django takes.
preload_app = True
timeout = 30
graceful_timeout = 1
# A connection a request: the next one may reach any worker, as it would behind a load balancer.
keepalive = 0
control_socket_disable = True

demo = socket.socket(fileno=int(os.environ["DEMO_REPORT_FD"]))


def report(word: str, pid: int, charge: str = "") -> None:
    """Tell the demo of a worker's life, or of the trouble that a charge met in it. ``charge`` is like "protected/7"."""
    # Short enough to be sent whole, so that the lines of many workers don't mix.
    demo.sendall(f"{word} {pid} {charge.replace('/', ' ')}\n".encode("ascii"))


def post_fork(server: Any, worker: Any) -> None:
    def end_with_the_demo() -> None:
        if not demo.recv(1):
            os.kill(server.pid, signal.SIGTERM)

    threading.Thread(target=end_with_the_demo, daemon=True).start()
    report("born", os.getpid())


def post_request(worker: Any, request: Any, environ: dict[str, Any], response: Any) -> None:
    if "demo.stalled" in environ:
        report("awake", os.getpid(), environ["demo.stalled"])


def child_exit(server: Any, worker: Any) -> None:
    try:
        report("gone", worker.pid)
    except OSError:
        server.log.warning("The demo is gone; nobody was told of the end of worker %s.", worker.pid)
