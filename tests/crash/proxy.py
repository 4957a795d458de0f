"""A proxy in front of PostgreSQL that forwards a COMMIT and cuts the connection before its answer comes back."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import tempfile
import threading
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit

from tests.crash.listener import CHUNK, Listener

SOCKET_NAME = ".s.PGSQL.5432"


class Proxy(Listener):
    """Listens on a Unix socket, so that what passes is neither encrypted nor negotiated about.

    Of the COMMITs that end a completing update it swallows the answers of half, until ``count`` were swallowed. Now and
    then it cuts before the COMMIT is forwarded: the client can't tell the one from the other.
    """

    def __init__(self, url: str, count: int, *, seed: int = 0) -> None:
        self._parts = urlsplit(url)
        self._count = count
        self._lots = random.Random(seed)
        self._lock = threading.Lock()
        self.swallowed = 0
        self.kept_back = 0
        self._directory = tempfile.TemporaryDirectory(prefix="crash-proxy-")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(Path(self._directory.name, SOCKET_NAME)))
        listener.listen(128)
        super().__init__(listener)

    @property
    def url(self) -> str:
        host = quote(self._directory.name, safe="")
        credentials, _, _ = self._parts.netloc.rpartition("@")
        return urlunsplit(self._parts._replace(netloc=f"{credentials}@", query=f"host={host}"))

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._directory.cleanup()

    def _connect(self) -> socket.socket:
        host = parse_qs(self._parts.query).get("host", [None])[0]
        if host is None:
            return socket.create_connection((self._parts.hostname or "localhost", self._parts.port or 5432))
        server = socket.socket(socket.AF_UNIX)
        server.connect(str(Path(host, SOCKET_NAME)))
        return server

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(ConnectionError), self._connect() as server:
            spoken = Frontend()
            while True:
                ready = select.select([client, server, self._closed], [], [])[0]
                if self._closed in ready:
                    return
                if server in ready:
                    if not (answer := server.recv(CHUNK)):
                        return
                    client.sendall(answer)
                if client in ready:
                    if not (said := client.recv(CHUNK)):
                        return
                    if spoken.commits_an_outcome(said) and (forward := self._swallow()) is not None:
                        if forward:
                            server.sendall(said)
                        return
                    server.sendall(said)

    def _swallow(self) -> bool | None:
        """Whether to cut this one, and if so whether to forward it first."""
        with self._lock:
            if self.swallowed >= self._count or self._lots.random() < 0.5:
                return None
            forward = self._lots.random() < 0.9
            if forward:
                self.swallowed += 1
            else:
                self.kept_back += 1
            return forward


class Frontend:
    """What a client says: messages of a type, a length and a body, the first one without a type."""

    def __init__(self) -> None:
        self._rest = b""
        self._introduced = False
        self._completing = False

    def commits_an_outcome(self, said: bytes) -> bool:
        self._rest += said
        committing = False
        while True:
            head = 1 if self._introduced else 0
            if len(self._rest) < head + 4:
                return committing
            end = head + struct.unpack_from("!I", self._rest, head)[0]
            if len(self._rest) < end:
                return committing
            message, self._rest = self._rest[:end], self._rest[end:]
            if self._introduced:
                if b"completed_at = " in message:
                    self._completing = True
                elif message[5:].rstrip(b"\0") == b"COMMIT":
                    committing, self._completing = self._completing, False
            self._introduced = True
