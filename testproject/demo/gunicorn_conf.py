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
threads = 8
# Forked workers start at once, so that a killed one is missed for milliseconds and not for the time Django takes.
preload_app = True
timeout = 30
graceful_timeout = 2
# A connection a request: the next one may reach any worker, as it would behind a load balancer.
keepalive = 0
control_socket_disable = True

report = socket.socket(fileno=int(os.environ["DEMO_REPORT_FD"]))


def post_fork(server: Any, worker: Any) -> None:
    def end_with_the_demo() -> None:
        if not report.recv(1):
            os.kill(server.pid, signal.SIGTERM)

    threading.Thread(target=end_with_the_demo, daemon=True).start()
    report.sendall(f"born {os.getpid()}\n".encode())


def child_exit(server: Any, worker: Any) -> None:
    try:
        report.sendall(f"gone {worker.pid}\n".encode())
    except OSError:
        server.log.warning("The demo is gone; nobody was told of the end of worker %s.", worker.pid)
