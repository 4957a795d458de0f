"""HTTP/1.1 over a socket, for requests that an HTTP library would refuse to send, and for misbehaving clients."""

from __future__ import annotations

import json
import select
import socket
import ssl
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cached_property
from http.client import HTTPException, HTTPResponse
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from typing import Self

#: Header fields as sent on the wire. A field can be repeated, and a value can hold any byte.
Fields = Sequence[tuple[str, bytes]]

#: Errors that can occur instead of an answer.
WIRE_ERRORS = (OSError, HTTPException)


@dataclass(frozen=True)
class Answer:
    """A complete response."""

    status: int
    #: Names are in lower case.
    fields: tuple[tuple[str, str], ...]
    body: bytes

    def field(self, name: str) -> str | None:
        """The values of a header field, joined by a comma. None if it wasn't sent."""
        values = [value for other, value in self.fields if other == name.lower()]
        return ", ".join(values) if values else None

    @property
    def retry_after(self) -> float | None:
        """The seconds until ``Retry-After``, which may be a date. None without one, or if it is neither."""
        value = self.field("Retry-After") or ""
        if value.isdecimal():
            return float(value)
        try:
            return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
        except ValueError:
            return None

    @cached_property
    def content(self) -> bytes:
        """The body in a form in which equal JSON is equal, because a server may store JSON instead of bytes."""
        try:
            return json.dumps(json.loads(self.body), sort_keys=True).encode()
        except ValueError:
            return self.body

    @property
    def succeeded(self) -> bool:
        return 200 <= self.status < 300

    def __str__(self) -> str:
        text = self.body[:120].decode(errors="replace")
        return f"{self.status} {text!r}"


@dataclass(frozen=True)
class Request:
    """A request and its URL. ``head`` ends with the empty line."""

    url: str
    head: bytes
    body: bytes


def build(
    method: str, url: str, fields: Fields, body: bytes, *, is_chunked: bool = False, connection: bytes = b"close"
) -> Request:
    """
    :param fields: added to ``Host``, ``Content-Length`` and ``Connection``.
    :param is_chunked: send the body in two chunks instead of with its length.
    :param connection: the value of ``Connection``.
    """
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    length = ("Content-Length", b"%d" % len(body))
    if is_chunked:
        length = ("Transfer-Encoding", b"chunked")
        half = (len(body) + 1) // 2
        chunks = [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (*filter(None, (body[:half], body[half:])), b"")]
        body = b"".join(chunks)
    own = [("Host", parts.netloc.encode()), length, ("Connection", connection)]
    lines = [
        f"{method} {target} HTTP/1.1".encode(),
        *(name.encode() + b": " + value for name, value in (*own, *fields)),
    ]
    return Request(url, b"\r\n".join(lines) + b"\r\n\r\n", body)


class Connection:
    """A TCP connection. As a context manager, it closes itself."""

    #: Whether the server keeps the connection open after the answer that was read last.
    is_kept = True

    def __init__(self, request: Request, timeout: float) -> None:
        """
        :param timeout: in seconds, for each step.
        """
        parts = urlsplit(request.url)
        is_secure = parts.scheme == "https"
        self.request = request
        address = (parts.hostname or "", parts.port or (443 if is_secure else 80))
        self._socket = socket.create_connection(address, timeout)
        # Otherwise the kernel would hold back the last byte until the first ones are acknowledged.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if is_secure:
            context = ssl.create_default_context()
            self._socket = context.wrap_socket(self._socket, server_hostname=parts.hostname)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def fileno(self) -> int:
        """For ``select``."""
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def send_all(self) -> None:
        self.send(self.request.head + self.request.body)

    def send_all_but_the_last_byte(self) -> None:
        self.send((self.request.head + self.request.body)[:-1])

    def send_the_last_byte(self) -> None:
        self.send((self.request.head + self.request.body)[-1:])

    def half_close(self) -> None:
        """Close the sending direction. The server can still answer."""
        self._socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Make the later close reset the connection."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def is_answered(self, within: float = 0) -> bool:
        """Whether data or the end of the connection has arrived.

        :param within: how long to wait for it, in seconds.
        """
        return bool(select.select([self], [], [], within)[0])

    def read(self) -> Answer:
        """Read the answer.

        :raises OSError: no answer arrived in time, or the server dropped the connection.
        :raises http.client.HTTPException: the answer is incomplete or malformed.
        """
        with HTTPResponse(self._socket) as response:
            response.begin()
            fields = tuple((name.lower(), value) for name, value in response.getheaders())
            self.is_kept = not response.will_close
            return Answer(response.status, fields, response.read())

    def attempt(self) -> Answer | Exception:
        """As ``read``, but return an error instead of raising it."""
        try:
            return self.read()
        except WIRE_ERRORS as error:
            return error


def exchange(request: Request, timeout: float) -> Answer:
    """Send a request and read its answer.

    :raises OSError: as ``Connection.read``.
    :raises http.client.HTTPException: as ``Connection.read``.
    """
    with Connection(request, timeout) as connection:
        connection.send_all()
        return connection.read()


def exchange_together(requests: Iterable[Request], timeout: float) -> tuple[list[Answer | Exception], bool]:
    """Send requests at once: all but the last byte of each, then the last bytes.

    :returns: the answer or error of each request, and whether none had succeeded before the last request was sent.
    """
    with ExitStack() as opened:
        connections = [opened.enter_context(Connection(request, timeout)) for request in requests]
        for connection in connections:
            connection.send_all_but_the_last_byte()
        *others, last = connections
        for connection in others:
            connection.send_the_last_byte()
        # Checked before the last byte is sent. Afterwards, a prompt answer may be the refusal of a duplicate.
        early = [connection.is_answered() for connection in others]
        last.send_the_last_byte()
        answers = _answers(connections, timeout)
    overlapped = not any(
        is_early and isinstance(answer, Answer) and answer.succeeded
        for is_early, answer in zip(early, answers[:-1], strict=True)
    )
    return answers, overlapped


def _answers(connections: Sequence[Connection], timeout: float) -> list[Answer | Exception]:
    """The answer or error of each connection. Each is closed once it is read, because a server may wait for that."""
    answers: dict[Connection, Answer | Exception] = {}
    while waiting := [connection for connection in connections if connection not in answers]:
        answered = select.select(waiting, [], [], timeout)[0]
        for connection in answered:
            with connection:
                answers[connection] = connection.attempt()
        if not answered:
            answers.update(dict.fromkeys(waiting, TimeoutError(f"no answer within {timeout:g} s")))
    return [answers[connection] for connection in connections]
