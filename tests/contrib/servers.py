"""A real HTTP server on loopback that does to each request what the test says: answer, cut, hang, pass it on."""

import http.client
import socket
import struct
import threading
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from tests.harness.servers import in_thread

#: Closing a socket with this option sends a reset instead of an orderly end.
RESET_ON_CLOSE = struct.pack("ii", 1, 0)

PROBLEM = "application/problem+json"


@dataclass(frozen=True)
class Request:
    """What has arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def key(self):
        return self.headers.get("idempotency-key")


@dataclass
class Server:
    """Follows the script, one entry a request. Whatever comes after its end is answered 201."""

    script: list = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    released: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def keys(self):
        return [request.key for request in self.requests]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Header and body are two writes. With Nagle's algorithm the second would wait for the acknowledgement of the first.
    disable_nagle_algorithm = True

    def answer_by_script(self):
        encoding = self.headers.get("Transfer-Encoding")
        body = self.read_chunks() if encoding else self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        with self.script.lock:
            self.script.requests.append(Request(self.command, self.path, headers, body))
            fault = self.script.script.pop(0) if self.script.script else answer(201)
        fault(self)

    do_GET = do_POST = do_PATCH = do_PUT = answer_by_script  # noqa: N815 - the names of http.server

    def read_chunks(self):
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def write(self, status, headers, body, length=None):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def date_time_string(self, timestamp=None):
        return "Wed, 21 Oct 2026 07:28:00 GMT"  # the server's clock

    def log_message(self, *args):
        """Say nothing."""


def answer(status, body=b'{"id": 1}', **headers):
    """Answer, with headers named like ``retry_after``."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler: handler.write(status, {"Content-Type": "application/json", **named}, body)


def problem(status, code, **headers):
    """Answer as a protected view refuses."""
    return answer(status, f'{{"code": "{code}"}}'.encode(), content_type=PROBLEM, **headers)


def cut(handler):
    """Reset the connection before the answer."""
    handler.close_connection = True
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)


def cut_in_the_middle(handler):
    """Say that all went well, and end in the middle of the body."""
    handler.write(201, {"Content-Type": "application/json"}, b'{"id"', length=100)
    handler.wfile.flush()
    handler.close_connection = True


def hang(handler):
    """Answer nothing for as long as the test runs."""
    handler.script.released.wait(60)
    cut(handler)


def pass_on(upstream, *, lose_answer=False):
    """Let another server answer, and lose what it said."""

    def fault(handler):
        request = handler.script.requests[-1]
        headers = {name: value for name, value in request.headers.items() if name not in ("host", "connection")}
        with closing(http.client.HTTPConnection(urlsplit(upstream).netloc, timeout=60)) as connection:
            connection.request(request.method, request.path, request.body, {**headers, "connection": "close"})
            response = connection.getresponse()
            body = response.read()
        if lose_answer:
            cut(handler)
            return
        kept = {name: value for name, value in response.getheaders() if name.lower() not in ("content-length", "date")}
        handler.write(response.status, kept, body)

    return fault


@contextmanager
def serving(*script, tls=None):
    server = Server(list(script))
    handler = type("ScriptedHandler", (Handler,), {"script": server})
    listener = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    listener.daemon_threads = True
    listener.handle_error = lambda *args: None  # a client that has gone
    if tls is not None:
        listener.socket = tls.wrap_socket(listener.socket, server_side=True)
    server.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{listener.server_port}"
    with in_thread(listener):
        try:
            yield server
        finally:
            server.released.set()
