"""The server under the storm: gunicorn with several worker processes, on loopback.

Everything is started here and stopped here, by process id. Should the demo itself be killed, the workers notice that
its end of the socket pair is closed and stop gunicorn (``gunicorn_conf``).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from .tally import Tally
from .workers import Workers

START_LIMIT = 60.0  # seconds; a loaded machine may take several to import Django
STOP_LIMIT = 10.0
LOG_END = 10_000  # bytes, enough for a traceback


class ServerError(RuntimeError):
    """Gunicorn did not start; the message ends with its log."""


class Server:
    """A running gunicorn that listens on ``port`` of 127.0.0.1."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: BinaryIO, workers: Workers) -> None:
        self.process = process
        self.port = port
        self.log = log
        self.workers = workers

    def wait_until_ready(self, workers: int) -> None:
        """Return when every worker is born and a request is answered. Raises ``ServerError``."""
        deadline = time.monotonic() + START_LIMIT
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.workers.alive() >= workers and self._answers():
                return
            time.sleep(0.05)
        raise ServerError(f"The server did not start. Its log ends with:\n{self.log_tail()}")

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
                connection.sendall(b"GET /health/ HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                return connection.recv(9) == b"HTTP/1.1 "
        except OSError:
            return False

    def log_tail(self, lines: int = 20) -> str:
        # Not by seek and read: gunicorn writes where this descriptor stands.
        written = os.fstat(self.log.fileno()).st_size
        end = os.pread(self.log.fileno(), LOG_END, max(0, written - LOG_END))
        return "\n".join(end.decode(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End gunicorn and its workers, at once if they will not go by themselves."""
        self.process.terminate()
        try:
            self.process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            # The group is gunicorn's own, made for it by start_new_session.
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.workers.close()


@contextmanager
def serve(workers: int, tally: Tally) -> Iterator[Server]:
    """Run the sample project, with the demo's faults, on a free port of 127.0.0.1.

    Its settings are the environment's, the database's URL among them. Raises ``ServerError``.
    """
    ears, mouth = socket.socketpair()
    with tempfile.TemporaryFile() as log, mouth, socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gunicorn", "--config", "python:testproject.demo.gunicorn_conf"),
                *("--workers", str(workers), "--bind", f"fd://{listener.fileno()}"),
                "testproject.demo.faults:application",
            ],
            env={**os.environ, "DEMO_REPORT_FD": str(mouth.fileno())},
            pass_fds=(listener.fileno(), mouth.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C in the terminal reaches the demo, which then stops the server
        )
        port = listener.getsockname()[1]
        # Only gunicorn holds them from here: if it dies, clients are refused, and the reports end.
        listener.close()
        mouth.close()
        server = Server(process, port, log, Workers(ears, tally))
        try:
            server.wait_until_ready(workers)
            yield server
        finally:
            server.stop()
