"""Between a test and a process: a socket, and lines of JSON on it."""

import json
import select

#: A bound for whatever waits, in seconds. Nothing that works comes near it.
PATIENCE = 120


class Channel:
    """Lines of JSON, to the test and back."""

    def __init__(self, connection):
        connection.settimeout(PATIENCE)
        self._socket = connection
        self._lines = connection.makefile("rb")

    def tell(self, **event):
        self._socket.sendall(json.dumps(event).encode() + b"\n")

    def wait(self):
        """The next line from the other side. If that is gone, EOFError."""
        line = self._lines.readline()
        if not line:
            raise EOFError
        return json.loads(line)

    def has_something(self):
        """Whether ``wait`` would return at once."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def close(self):
        self._lines.close()
        self._socket.close()
