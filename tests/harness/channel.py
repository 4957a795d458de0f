"""Between a test and a process: a socket, and lines of JSON on it."""

from __future__ import annotations

import json
import select
import socket
from typing import Any

#: A bound for whatever waits, in seconds. Nothing that works comes near it.
PATIENCE = 120


class Channel:
    """Lines of JSON, to the test and back."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE)
        self._socket = connection
        self._lines = connection.makefile("rb")

    def tell(self, **event: Any) -> None:
        self._socket.sendall(json.dumps(event).encode() + b"\n")

    def wait(self) -> Any:
        """The next line from the other side. If that is gone, EOFError."""
        line = self._lines.readline()
        if not line:
            raise EOFError
        return json.loads(line)

    def has_something(self) -> bool:
        """Whether ``wait`` would return at once."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
