"""A proxy in front of a server that cuts connections, delays traffic, and drops a broker's confirm.

A broker's dialect recognises when a client has published a message, and when the broker confirms it.
"""

import contextlib
import select
import socket
import struct
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

from testproject.harness.processes import short_directory

CHUNK = 65_536


class Silent:
    """A server whose answers all reach their clients.

    In each dialect, ``published`` counts a client's messages, and ``confirms`` returns whether the broker confirms one.
    """

    def published(self, data):
        return 0

    def confirms(self, data):
        return False


class Amqp:
    """AMQP 0-9-1: frames of type, channel, size, payload and an end. ``basic.ack`` confirms ``basic.publish``."""

    PUBLISH = struct.pack("!HH", 60, 40)
    ACK = struct.pack("!HH", 60, 80)
    HEADER = b"AMQP\x00\x00\x09\x01"

    def __init__(self):
        self._rest = {"client": b"", "server": b""}

    def published(self, data):
        return self._methods("client", data).count(self.PUBLISH)

    def confirms(self, data):
        return self.ACK in self._methods("server", data)

    def _methods(self, side, data):
        rest, found = (self._rest[side] + data).removeprefix(self.HEADER), []
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

    def published(self, data):
        return data.count(b"\r\nLPUSH\r\n")

    def confirms(self, data):
        return data.startswith(b":")


class Proxy:
    """Listens as the server does: on a Unix socket, where encryption is not negotiated, or on a port.

    :param url: of the server.
    :param due: called with the number of each message, from 1; whether to swallow its confirm. False by default.
    """

    def __init__(self, url, due=lambda number: False):
        self._parts = urlsplit(url)
        self._due = due
        self._lock = threading.Lock()
        self._published = 0
        self.swallowed = 0
        #: The delay of a client's data on its way to the server, in seconds.
        self.delay = 0.0
        #: While it is set, no data from the server reaches a client.
        self.holding = False
        self._open = set()
        self._threads = []
        self._stack = ExitStack()

    def __enter__(self):
        if (server := self._socket_of_server()) is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
        else:
            self._path = self._stack.enter_context(short_directory("proxy-")) / server.name
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(self._path))
            self._listener.listen(128)
        #: Readable when the block has ended. Every thread polls it.
        self._closed, self._closing = socket.socketpair()
        self._start(self._accept)
        return self

    def __exit__(self, *error):
        self._closing.close()
        for thread in self._threads:
            thread.join()
        self._closed.close()
        self._listener.close()
        self._stack.close()

    def _socket_of_server(self):
        if self._parts.scheme.startswith("redis+socket"):
            return Path(unquote(self._parts.path))
        if host := parse_qs(self._parts.query).get("host"):
            return Path(host[0], ".s.PGSQL.5432")
        return None

    @property
    def url(self):
        """The URL for clients."""
        if self._parts.scheme.startswith("redis+socket"):
            return f"redis+socket://{quote(str(self._path))}"
        credentials, _, _ = self._parts.netloc.rpartition("@")
        if self._socket_of_server() is None:
            place = f"127.0.0.1:{self._listener.getsockname()[1]}"
            return self._parts._replace(netloc=f"{credentials}@{place}" if credentials else place).geturl()
        host = quote(str(self._path.parent), safe="")
        return self._parts._replace(netloc=f"{credentials}@", query=f"host={host}").geturl()

    def cut(self):
        """Cut all current connections, and return their number."""
        with self._lock:
            cut = list(self._open)
            for connection in cut:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        return len(cut)

    def _start(self, target, *arguments):
        thread = threading.Thread(target=target, args=arguments)
        thread.start()
        self._threads.append(thread)

    def _accept(self):
        while self._closed not in select.select([self._listener, self._closed], [], [])[0]:
            self._start(self._serve, self._listener.accept()[0])

    def _connect(self):
        if (path := self._socket_of_server()) is None:
            there = socket.create_connection((self._parts.hostname or "localhost", self._parts.port or 5432))
            there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return there
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(str(path))
        except OSError:
            server.close()
            raise
        return server

    def _serve(self, client):
        with client, contextlib.suppress(OSError), self._connect() as server:
            with self._lock:
                self._open.add(client)
            try:
                self._pass_on(client, server)
            finally:
                with self._lock:
                    self._open.discard(client)

    def _pass_on(self, client, server):
        dialects = {"amqp": Amqp, "redis+socket": Resp}
        dialect = dialects.get(self._parts.scheme, Silent)()
        swallowing = False
        while True:
            heard = [client, self._closed] if self.holding else [client, server, self._closed]
            ready = select.select(heard, [], [])[0]
            if self._closed in ready:
                return
            if server in ready and not self.holding:
                if not (answer := server.recv(CHUNK)):
                    return
                if dialect.confirms(answer) and swallowing:
                    with self._lock:
                        self.swallowed += 1
                    return
                client.sendall(answer)
            if client in ready:
                if not (data := client.recv(CHUNK)):
                    return
                swallowing = self._is_due(dialect.published(data)) or swallowing
                if self.delay:
                    time.sleep(self.delay)  # simulates a slow network
                server.sendall(data)

    def _is_due(self, messages):
        with self._lock:
            numbers = range(self._published + 1, self._published + messages + 1)
            self._published += messages
            return any(self._due(number) for number in numbers)
