"""A real HTTP server on loopback that treats each request as the test scripts it: answer, cut, or pass on."""

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


@dataclass(frozen=True)
class Request:
    """A received request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def key(self):
        return self.headers.get("idempotency-key")


@dataclass
class Server:
    """Follows the script, one entry per request. Requests after its end get 201."""

    script: list = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def keys(self):
        return [request.key for request in self.requests]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Header and body are two writes. With Nagle's algorithm the second would wait for the acknowledgement of the first.
    disable_nagle_algorithm = True

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        with self.script.lock:
            self.script.requests.append(Request(self.command, self.path, headers, body))
            fault = self.script.script.pop(0) if self.script.script else answer(201)
        fault(self)

    def write(self, status, headers, body):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Log nothing."""


def answer(status, body=b'{"id": 1}', **headers):
    """Answer, with headers named like ``retry_after``."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler: handler.write(status, {"Content-Type": "application/json", **named}, body)


def cut(handler):
    """Reset the connection before the answer."""
    handler.close_connection = True
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)


def pass_on(upstream, *, lose_answer=False):
    """Let another server answer, and optionally lose its response."""

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
def serving():
    server = Server()
    handler = type("ScriptedHandler", (Handler,), {"script": server})
    listener = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    listener.daemon_threads = True
    listener.handle_error = lambda *args: None  # a client that has gone
    server.url = f"http://127.0.0.1:{listener.server_port}"
    with in_thread(listener):
        yield server
