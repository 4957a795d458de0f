"""A proxy in front of a broker that lets a message through, swallows the confirm that it has arrived, and cuts."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from typing import Protocol
from urllib.parse import urlsplit

from tests.crash.listener import CHUNK, Listener


class Dialect(Protocol):
    """What of a conversation has to be understood."""

    def published(self, said: bytes) -> int:
        """How many messages end in what the client says."""

    def confirmed(self, said: bytes) -> bool:
        """Whether what the broker says confirms one."""


class Amqp:
    """AMQP 0-9-1: frames of type, channel, size, payload and an end. ``basic.ack`` confirms ``basic.publish``."""

    PUBLISH = struct.pack("!HH", 60, 40)
    ACK = struct.pack("!HH", 60, 80)
    HEADER = b"AMQP\x00\x00\x09\x01"

    def __init__(self) -> None:
        self._rest = {"client": b"", "broker": b""}

    def published(self, said: bytes) -> int:
        return self._methods("client", said).count(self.PUBLISH)

    def confirmed(self, said: bytes) -> bool:
        return self.ACK in self._methods("broker", said)

    def _methods(self, side: str, said: bytes) -> list[bytes]:
        rest, found = (self._rest[side] + said).removeprefix(self.HEADER), []
        while len(rest) >= 7:
            kind, _, size = struct.unpack_from("!BHI", rest)
            if len(rest) < size + 8:
                break
            if kind == 1:
                found.append(rest[7:11])
            rest = rest[size + 8 :]
        self._rest[side] = rest
        return found


class Resp:
    """Redis: kombu puts a message in its queue with LPUSH, which answers with the queue's length."""

    def published(self, said: bytes) -> int:
        return said.count(b"\r\nLPUSH\r\n")

    def confirmed(self, said: bytes) -> bool:
        return said.startswith(b":")


class Proxy(Listener):
    """Swallows the confirm of every ``every``-th publish; 0 swallows none."""

    def __init__(self, url: str, every: int = 0) -> None:
        super().__init__(socket.create_server(("127.0.0.1", 0)))
        self._url = url
        self._parts = urlsplit(url)
        self._every = every
        self._lock = threading.Lock()
        self._published = 0
        self.swallowed = 0
        self._open: set[socket.socket] = set()

    @property
    def url(self) -> str:
        return self._url.replace(f":{self._parts.port}/", f":{self._listener.getsockname()[1]}/")

    def cut(self) -> int:
        """Cut every connection there is now, and say how many there were."""
        with self._lock:
            cut = list(self._open)
            for connection in cut:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        return len(cut)

    def _serve(self, client: socket.socket) -> None:
        place = (self._parts.hostname or "", self._parts.port or 0)
        with client, contextlib.suppress(OSError), socket.create_connection(place) as broker:
            with self._lock:
                self._open.add(client)
            try:
                self._pass_on(client, broker)
            finally:
                with self._lock:
                    self._open.discard(client)

    def _pass_on(self, client: socket.socket, broker: socket.socket) -> None:
        spoken: Dialect = Amqp() if self._parts.scheme == "amqp" else Resp()
        for end in (client, broker):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        swallowing = False
        while True:
            ready = select.select([client, broker, self._closed], [], [])[0]
            if self._closed in ready:
                return
            if broker in ready:
                if not (answer := broker.recv(CHUNK)):
                    return
                if spoken.confirmed(answer) and swallowing:
                    with self._lock:
                        self.swallowed += 1
                    return
                client.sendall(answer)
            if client in ready:
                if not (said := client.recv(CHUNK)):
                    return
                swallowing = self._is_due(spoken.published(said)) or swallowing
                broker.sendall(said)

    def _is_due(self, published: int) -> bool:
        with self._lock:
            before, self._published = self._published, self._published + published
            return bool(self._every) and before // self._every < self._published // self._every
