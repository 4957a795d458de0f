"""Uploads to gunicorn or uvicorn that are interrupted and then sent again whole."""

import json
import os
import socket
import sys
from contextlib import closing

import pytest

from testproject.harness.processes import Daemon, answers, free_port
from tests.harness.world import Database, environment, migrate, own_database
from tests.harness.zygote import ROOT

pytestmark = [pytest.mark.failure_39, pytest.mark.once]

SMALL, LARGE = 2_000, 5_000_000  # DATA_UPLOAD_MAX_MEMORY_SIZE is between them
SERVERS = {
    "gunicorn": ["testproject.wsgi", "--chdir", str(ROOT), "--no-control-socket", "--bind", "127.0.0.1:{port}"],
    "uvicorn": ["testproject.asgi:application", "--app-dir", str(ROOT), "--port", "{port}"],
}


class Server:
    """A server and its database, with a client."""

    def __init__(self, name, port, database):
        self.name, self.port, self.database = name, port, database

    def effects(self):
        return self.database.count("SELECT count(*) FROM testproject_transfer")

    def send(self, url, body, headers, *, is_cut):
        """Send a request and read the response. ``is_cut`` closes the connection after half of the body.

        :returns: the status and the content, or None without a response.
        """
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            head = {"Host": "127.0.0.1", "Connection": "close", **headers}
            lines = [f"POST {url} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
            connection.sendall("\r\n".join(lines).encode())
            connection.sendall(body[: len(body) // 2] if is_cut else body)
            if is_cut:
                connection.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        if not answer:
            return None
        head, _, content = answer.partition(b"\r\n\r\n")
        if b"chunked" in head:
            content = content.split(b"\r\n")[1]
        return int(head.split()[1]), json.loads(content)


@pytest.fixture(scope="module")
def database():
    with own_database(os.environ["DATABASE_URL"]) as url:
        migrate(url)
        with closing(Database(url)) as database:
            yield url, database


@pytest.fixture(scope="module", params=SERVERS)
def server(request, database, tmp_path_factory):
    url, effects = database
    port = free_port()
    command = [sys.executable, "-m", request.param, *(part.format(port=port) for part in SERVERS[request.param])]
    ready = lambda: answers(("127.0.0.1", port), b"GET /health/ HTTP/1.0\r\n\r\n", b"HTTP/1.")  # noqa: E731
    variables = {**environment(url), "DJANGO_SETTINGS_MODULE": "tests.http.uploads.settings"}
    directory = tmp_path_factory.mktemp(request.param)
    with Daemon(request.param, command, directory, environment=variables, is_ready=ready):
        yield Server(request.param, port, effects)


def multipart(size):
    part = '--b\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n'
    file = part.format("file", '; filename="a.csv"').encode() + b"a,b\n" * (size // 4)
    return file + b"\r\n" + part.format("key", "").encode() + b"THE KEY\r\n--b--\r\n"


def csv(size):
    return b"a,b\n" * (size // 4)


FORM, CSV = {"Content-Type": "multipart/form-data; boundary=b"}, {"Content-Type": "text/csv"}
FILE = {**CSV, "Content-Disposition": "attachment; filename=a.csv"}
UPLOADS = [
    *[("/form/", size, multipart, FORM) for size in (SMALL, LARGE)],
    *[("/key/", size, multipart, FORM) for size in (SMALL, LARGE)],
    *[("/drf/", size, multipart, FORM) for size in (SMALL, LARGE)],
    *[("/file/", size, csv, FILE) for size in (SMALL, LARGE)],
    *[("/stream/", size, csv, CSV) for size in (SMALL, LARGE)],
    ("/body/", SMALL, csv, CSV),
    ("/command/", SMALL, csv, CSV),
]


@pytest.mark.parametrize(("url", "size", "make", "kind"), UPLOADS)
def test_an_interrupted_upload_runs_only_when_sent_whole(server, url, size, make, kind):
    before, key = server.effects(), f"{server.name}{url}{size}"
    body = make(size).replace(b"THE KEY", key.encode())
    headers = {**kind, "Content-Length": len(body), "Digest": f"{size}"}
    if url != "/key/":
        headers["Idempotency-Key"] = key
    cut = server.send(url, body, headers, is_cut=True)
    assert server.effects() == before
    # Under ASGI, Django drops the request.
    assert cut is None if server.name == "uvicorn" else (cut[0], cut[1]["code"]) == (400, "idempotency_payload_invalid")
    assert server.send(url, body, headers, is_cut=False) == (201, {"size": size})
    assert server.effects() == before + 1


def test_an_interrupted_chunked_upload_runs_only_when_sent_whole(server):
    url = "/command/" if server.name == "uvicorn" else "/server/"
    before, chunk = server.effects(), csv(SMALL)
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(chunk), chunk)
    headers = {**CSV, "Transfer-Encoding": "chunked", "Idempotency-Key": server.name, "Digest": "d"}
    cut = server.send(url, body, headers, is_cut=True)
    assert cut is None if server.name == "uvicorn" else (cut[0], cut[1]["code"]) == (400, "idempotency_payload_invalid")
    assert server.effects() == before
    assert server.send(url, body, headers, is_cut=False) == (201, {"size": SMALL})
    assert server.effects() == before + 1
