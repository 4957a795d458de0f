"""Starts gunicorn or uvicorn on a Unix socket, and calls it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path

from django.db import connection

from testproject.harness.processes import Daemon, answers, short_directory, wait_until
from tests.database import processes
from tests.harness.zygote import ROOT

COMMANDS = {
    "gunicorn": "--config python:tools.benchmarks.service.gunicorn_settings testproject.wsgi --bind unix:{}",
    "uvicorn": "--log-level warning testproject.asgi:application --uds {}",
}
QUESTION = b"GET /health/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
#: The application_name of the server's database connections.
APPLICATION_NAME = f"benchmarks-{os.getpid()}"
STOP_LIMIT = 30.0  # seconds


@contextmanager
def serving(server: str, **environment: str) -> Iterator[tuple[Path, int]]:
    """Run ``server`` during the block, on this process's database.

    :param environment: variables for the server.
    :returns: its socket and its process id.
    """
    if find_spec(server) is None:
        raise SystemExit(f"This experiment needs {server}. Install it with\n    python -m pip install gunicorn uvicorn")
    with short_directory("serving-") as directory:
        place = directory / "http"
        variables = {
            "DATABASE_URL": processes.environment()["DATABASE_URL"],
            "DJANGO_SETTINGS_MODULE": "tools.benchmarks.service.settings",
            "PGAPPNAME": APPLICATION_NAME,
            "PYTHONPATH": str(ROOT),
            **environment,
        }
        daemon = Daemon(
            server,
            [sys.executable, "-m", server, *COMMANDS[server].format(place).split()],
            directory,
            environment=variables,
            is_ready=lambda: answers(place, QUESTION, b"HTTP/1.1 200"),
        )
        with daemon:
            yield place, daemon.pid
        wait_until(lambda: not sessions(), "the end of the server's connections", STOP_LIMIT)


def sessions() -> int:
    """The number of the server's database connections."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", [APPLICATION_NAME])
        return int(cursor.fetchone()[0])


def cpu_seconds(process: int) -> float:
    """The CPU time of a server process and its forks. 0 without ``/proc``."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == process:  # the session id, because the server leads a session
                ticks += int(fields[11]) + int(fields[12])  # in user mode and in the kernel
    return ticks / os.sysconf("SC_CLK_TCK")


class Client:
    """Sends one request after the other over a persistent connection, if the server keeps it open."""

    def __init__(self, path: Path, authorization: str) -> None:
        self._connection = _UnixConnection(path)
        self._headers = {"Authorization": authorization, "Content-Type": "application/json"}

    def post(self, path: str, key: str, body: str) -> None:
        self._connection.request("POST", path, body, {**self._headers, "Idempotency-Key": key})
        response = self._connection.getresponse()
        content = response.read()
        assert response.status == 201, (response.status, content)

    def close(self) -> None:
        self._connection.close()


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=120)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
