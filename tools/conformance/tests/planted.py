"""A small server that conforms to each profile, and can be configured to break one rule.

``python planted.py DIRECTORY PORT PROFILE [FAULT …]`` runs it with two processes on one port, for the
cases that kill or freeze one. Tests of the other cases run it in a thread.

Records and effects are in one SQLite file, so that an effect and its record commit together.
"""

import contextlib
import json
import os
import re
import socket
import sqlite3
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import uuid4

#: The lease of a claim, in seconds. The short one is for processes that are killed or frozen.
LEASE, SHORT_LEASE = 600.0, 1.0
#: The limit of every wait, in seconds, so that a deadlock fails.
PATIENCE = 120.0
#: The read of the counter before which an effect is repeated. By then the suite has verified the counter.
LATER = 6

#: The status and the code of each refusal. Stripe runs a request without a key.
INVALID = {"invalid": (400, "invalid"), "stranger": (401, "stranger"), "method": (405, "method")}
FORMS = {
    "ietf": INVALID | {"missing": (400, "missing"), "reused": (422, "reused"), "in_progress": (409, "in progress")},
    "stripe": INVALID | {"reused": (400, "idempotency_error"), "in_progress": (409, "idempotency_key_in_use")},
    "acp": INVALID
    | {"missing": (400, "idempotency_key_required"), "reused": (422, "idempotency_conflict")}
    | {"in_progress": (409, "idempotency_in_flight")},
}

SCHEMA = """
PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS records (
    scope TEXT PRIMARY KEY, payload TEXT, path TEXT, attempt INTEGER, lease REAL, answer TEXT, expires REAL
);
CREATE TABLE IF NOT EXISTS effects (scope TEXT);
PRAGMA case_sensitive_like = ON;
"""


class Server(ThreadingHTTPServer):
    """One process of the server."""

    request_queue_size = 512
    daemon_threads = True

    def __init__(self, directory, profile, faults, *, ttl=3600, lease=LEASE, clock=time.time, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.directory, self.profile, self.faults = directory, profile, faults
        self.ttl, self.lease, self.clock = ttl, lease, clock
        self.begun = threading.Event()
        self.claiming = threading.Condition()
        self.awaited = 0
        #: Whether a fault that depends on the connection strikes the next request.
        self.strikes_next = False
        #: Whether the struck request is answered only when its client is gone.
        self.waits_for_the_cut = False
        self.cached = {}
        self.counts = 0
        with self.transaction() as database:
            database.executescript(SCHEMA)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    @contextmanager
    def transaction(self):
        store = sqlite3.connect(self.directory / "store", timeout=20, isolation_level=None)
        with contextlib.closing(store) as database:
            database.execute("PRAGMA synchronous = OFF")  # no test cuts the power
            database.execute("BEGIN IMMEDIATE")
            yield database
            with contextlib.suppress(sqlite3.OperationalError):  # executescript has committed
                database.execute("COMMIT")

    def expect(self, count):
        """Run or refuse the next requests only when ``count`` of them have claimed their keys."""
        with self.claiming:
            self.awaited = count

    def meet(self):
        with self.claiming:
            self.awaited -= 1
            self.claiming.notify_all()
            if not self.claiming.wait_for(lambda: self.awaited <= 0, PATIENCE):
                raise TimeoutError(f"{self.awaited} more requests were expected")

    def hold(self):
        """Let the operation run while the file ``hold`` exists. The file ``held`` then names the process."""
        if not (hold := self.directory / "hold").exists():
            return
        held = self.directory / "held.new"
        held.write_text(str(os.getpid()))
        held.rename(self.directory / "held")
        deadline = time.monotonic() + PATIENCE
        while hold.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the operation was held for too long")
            time.sleep(0.01)  # until the strike, in another process, deletes the file

    def process_request(self, request, client_address):
        """Let requests claim in the order of their arrival, so that the fault strikes the one that is cut."""
        self.begun.clear()
        super().process_request(request, client_address)
        if "forgets-on-cut" in self.faults:
            self.begun.wait(PATIENCE)

    def handle_error(self, request, client_address):
        """Ignore clients that cut their connection."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    is_struck = False

    def finish(self):
        self.server.begun.set()
        super().finish()

    def log_message(self, *args):
        pass

    def has(self, fault):
        return fault in self.server.faults

    def do_GET(self):
        if self.path != "/count":
            self.do_PUT()
            return
        self.server.counts += 1
        with self.server.transaction() as database:
            if self.has("repeats-later") and self.server.counts == LATER:
                database.execute("INSERT INTO effects VALUES ('later')")
            self._send({"status": 200, "body": str(database.execute("SELECT count(*) FROM effects").fetchone()[0])})

    def do_PUT(self):
        if self.has("method-blind"):
            self.do_POST()
            return
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send(self._refusal("broken" if self.has("breaks-on-methods") else "method"))

    do_PATCH = do_PUT  # noqa: N815 - the base class looks for it

    def do_POST(self):
        self.is_struck, self.server.strikes_next = self.server.strikes_next, False
        if self.headers["Transfer-Encoding"] == "chunked":
            self.unread = 0
            self._protect(self._key(), self._chunks())
            return
        length = int(self.headers["Content-Length"])
        if self.has("one-account") and self.headers["Authorization"] == "bob":
            self.close_connection = True
            self.server.meet()
            self._send(self._refusal("invalid"))
            return
        if self.has("answers-early") and self.is_struck:
            self.close_connection = True
            self._send(self._refusal("invalid"))
            return
        self.unread = length // 2 if self.has("reads-half") and self.is_struck else 0
        body = self.rfile.read(length - self.unread)
        if len(body) < length - self.unread and not self.has("runs-half-requests"):
            self.close_connection = True
            return
        key = self._key()
        if "Authorization" not in self.headers and not self.has("serves-strangers"):
            self._send(self._refusal("stranger"))
        elif key is None and self.has("breaks-on-keys"):
            self._send(self._refusal("broken"))
        elif key is None and "Idempotency-Key" in self.headers and not self.has("takes-any-key"):
            self._send(self._refusal("invalid"))
        elif key is None and "missing" in FORMS[self.server.profile] and not self.has("runs-without-key"):
            self._send(self._refusal("missing"))
        elif key is None:
            self._send(self._run(body, None, 0))
        else:
            self._protect(key, body)

    def _chunks(self):
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _key(self):
        """The key, if it is sent once and well-formed."""
        values = self.headers.get_all("Idempotency-Key") or []
        if self.has("takes-any-key"):
            return values[0] if values else None
        if len(values) != 1 or self.has("takes-no-key"):
            return None
        if self.server.profile == "ietf":
            match = re.fullmatch(r'"([\x20-\x21\x23-\x7e]+)"', values[0])
            return self._blurred(match[1]) if match else None
        return self._blurred(values[0]) if re.fullmatch(r"[\x20-\x7e]{1,255}", values[0]) else None

    def _blurred(self, key):
        """The key, or another one if the server confuses them."""
        for fault in self.server.faults:
            if fault.startswith("cuts-at-"):
                key = key[: int(fault.rpartition("-")[2])]
        key = key[1:] if self.has("skips-one") else key
        key = key.lower() if self.has("folds-case") else key
        key = key.replace(" ", "") if self.has("drops-blanks") else key
        return key.rstrip() if self.has("strips") else key

    def _protect(self, key, body):
        account = "" if self.has("key-alone") else self.headers.get("Authorization", "alice").partition("/")[0]
        path = "" if self.has("path-blind") or self.server.profile == "stripe" else self.path
        payload = body.decode() if self.has("order-matters") else json.dumps(_parsed(body), sort_keys=True)
        payload += self.headers["Idempotency-Key"] if self.has("fingerprints-the-key") else ""
        scope = json.dumps([account, path, key, payload if self.has("payload-in-scope") else ""])
        if self.has("ignores-keys"):
            scope = json.dumps([account, path, uuid4().hex, ""])
        kind, attempt, answer = self._claim(scope, payload)
        self.server.begun.set()
        self.server.meet()
        if kind == "replay":
            answer = self._distorted(answer)
        elif kind == "run":
            answer = self._run(body, scope, attempt)
        if self.has("answers-late"):  # no fault: the effect is visible before the answer
            self.server.hold()
        if self.is_struck and self.server.waits_for_the_cut:
            self._is_gone(ConnectionResetError)
        self.rfile.read(self.unread)  # of the fault "reads-half": an early answer would be another fault
        if self.has("one-answer"):  # like a cache that ignores accounts
            answer = self.server.cached.setdefault(key, answer)
        self._send({**answer, "key": key})

    def _claim(self, scope, payload):
        """:returns: whether to run, replay or refuse; the attempt; and the answer, unless it is to run."""
        now = self.server.clock()
        found = "? LIKE scope OR scope LIKE ?" if self.has("like") else "scope IN (?, ?)"
        with self.server.transaction() as database:
            if self.has("remembers-few"):
                newest = "SELECT rowid FROM records ORDER BY rowid DESC LIMIT 2"
                database.execute(f"DELETE FROM records WHERE rowid NOT IN ({newest})")
            row = database.execute(
                f"SELECT payload, path, attempt, lease, answer, expires FROM records WHERE {found}", (scope, scope)
            ).fetchone()
            locked = database.execute(
                "SELECT 1 FROM records WHERE answer IS NULL AND instr(scope, ?)", (json.loads(scope)[2],)
            ).fetchone()
            if locked and self.has("one-lock"):
                return "refuse", 0, self._refusal("in_progress")
            if row is not None and row[5] < now and self.has("refuses-expired"):
                return "refuse", 0, self._refusal("invalid")
            if row is None or (row[5] < now and not self.has("never-expires")):
                if self.has("races"):
                    row = None
                else:
                    database.execute("DELETE FROM records WHERE scope = ?", (scope,))
                    self._insert(database, scope, payload, now)
                    return "run", 1, {}
            elif row[4] is not None or row[3] > now:
                differs = row[0] != payload or (self.server.profile == "stripe" and row[1] != self.path)
                if self.has("path-blind") and row[1] != self.path:
                    differs = False
                if differs and not self.has("ignores-payload") and row[4] is not None:
                    return "refuse", 0, self._refusal("reused", json.loads(row[4]))
                if row[4] is None:
                    return "refuse", 0, self._refusal("in_progress")
                return "replay", 0, json.loads(row[4])
            elif self.has("parks-after-a-crash"):
                return "refuse", 0, self._refusal("in_progress") | {"wait": None}
            elif self.has("blocks-after-a-crash"):
                return "refuse", 0, self._refusal("in_progress")
            else:
                taken = "UPDATE records SET attempt = attempt + 1, lease = ? WHERE scope = ?"
                database.execute(taken, (now + self.server.lease, scope))
                return "run", row[2] + 1, {}
        return "run", 0, {}  # of the fault "races": the record is written after the operation

    def _insert(self, database, scope, payload, now):
        statement = "INSERT OR REPLACE INTO records VALUES (?, ?, ?, 1, ?, ?, ?)"
        answer = json.dumps(self._answer(201)) if self.has("record-before-effect") else None
        lease = 0 if self.has("short-lease") else self.server.lease
        ttl = self.server.ttl / 2 if self.has("expires-at-half") else self.server.ttl
        database.execute(statement, (scope, payload, self.path, now + lease, answer, now + ttl))

    def _run(self, body, scope, attempt):
        """The operation. Without a scope it runs without protection."""
        effect = "INSERT INTO effects VALUES (?)"
        if self.has("effect-before-record"):
            with self.server.transaction() as database:
                database.execute(effect, (scope,))
        if not self.has("answers-late"):
            self.server.hold()
        outcome = _parsed(body).get("outcome", 201)
        answer = self._answer(outcome)
        busy = _parsed(body).get("busy")
        if busy is not None and busy not in self.server.cached:  # only once
            self.server.cached[busy], outcome = True, 429
            answer = {"status": outcome, "body": "busy", "location": None}
        with self.server.transaction() as database:
            if self.has("races") and scope is not None:
                self._insert(database, scope, json.dumps(_parsed(body), sort_keys=True), self.server.clock())
            if outcome >= 500 and (self.has("blocks-after-5xx") or self.has("parks-after-a-crash")):
                lease = 3600 if self.has("blocks-after-5xx") else -3600
                database.execute("UPDATE records SET lease = lease + ? WHERE scope = ?", (lease, scope))
                return answer
            released = (outcome >= 500) == (self.server.profile != "stripe") and outcome >= 500
            released = released != (self.has("wrong-5xx") and outcome >= 500)
            released = (released or outcome in (429, 503)) and not self.has(f"records-{outcome}")
            if released or (self.has("forgets-errors") and 400 <= outcome < 500):
                database.execute("DELETE FROM records WHERE scope = ?", (scope,))
                return answer
            owned = "UPDATE records SET answer = ? WHERE scope = ? AND (attempt = ? OR ?)"
            unfenced = any(map(self.has, ("unfenced", "races", "short-lease", "record-before-effect")))
            done = database.execute(owned, (json.dumps(answer), scope, attempt, unfenced)).rowcount
            if scope is not None and not done:
                row = database.execute("SELECT answer FROM records WHERE scope = ?", (scope,)).fetchone()
                return json.loads(row[0]) if row[0] else self._refusal("in_progress")
            if outcome < 300 and not self.has("effect-before-record"):
                database.execute(effect, (scope,))
            # In the transaction of the effect, because between two transactions a retry could get the recorded answer.
            if self.has("forgets-on-cut") and self._is_gone(ConnectionResetError):
                database.execute("DELETE FROM records WHERE scope = ?", (scope,))
        return answer

    def _answer(self, outcome):
        return {"status": outcome, "body": json.dumps({"run": uuid4().hex}), "location": f"/{uuid4().hex}"}

    def _distorted(self, answer):
        """A replay, distorted by the server's fault."""
        return {
            "body": answer["body"] + ("!" if self.has("changes-body") else ""),
            "status": 404 if self.has("hides-errors") else 200 if self.has("changes-status") else answer["status"],
            "location": None if self.has("drops-headers") else answer["location"],
            "replayed": not self.has("unmarked"),
        }

    def _refusal(self, kind, first=None):
        """:param first: the answer to the first request with the key."""
        if kind == "broken" or (kind == "reused" and self.has("breaks-on-reuse")):
            return {"status": 500, "body": "{}"}
        status, code = FORMS[self.server.profile][kind]
        forms = {
            "ietf": {"title": code, "status": status},
            "stripe": {"error": {"type": "invalid_request_error", "code": code, "message": code}},
            "acp": {"type": "invalid_request", "code": code, "message": code},
        }
        form = forms[self.server.profile]
        if first is not None and self.has("shows-the-body"):
            form["original"] = first["body"]
        if first is not None and self.has("shows-a-member"):
            form["original"] = json.loads(first["body"])
        place = first["location"] if first is not None and self.has("shows-the-location") else None
        body = "no" if self.has("plain-errors") else json.dumps(form)
        status = 418 if self.has("odd-statuses") else 200 if self.has("refuses-nothing") else status
        waits = {"waits-for-years": "99999999", "waits-oddly": "soon"}
        wait = next((waits[fault] for fault in waits if self.has(fault)), "1") if kind == "in_progress" else None
        return {"status": status, "body": body, "wait": wait, "location": place}

    def _is_gone(self, *errors):
        """Whether the client has closed the connection or its direction of it."""
        # The client of a struck request always closes.
        self.connection.settimeout(PATIENCE if self.is_struck else 0)
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except errors:
            return True
        finally:
            self.connection.setblocking(True)

    def _send(self, answer):
        if self.has("half-closed-is-gone") and self._is_gone():
            self.close_connection = True
            return
        body = answer["body"].encode()
        is_problem = self.server.profile == "ietf" and "title" in answer["body"]
        self.send_response(answer["status"])
        self.send_header("Content-Type", "application/problem+json" if is_problem else "application/json")
        self.send_header("Content-Length", str(len(body)))
        if answer.get("location"):
            self.send_header("Location", answer["location"])
        if (answer.get("replayed") and self.server.profile != "ietf") or self.has("marks-everything"):
            self.send_header("Idempotent-Replayed", "true")
        if answer.get("wait") and not self.has("no-retry-after"):
            self.send_header("Retry-After", answer["wait"])
        if answer.get("key") and not self.has("no-echo"):
            self.send_header("Idempotency-Key", answer["key"])
        self.end_headers()
        self.wfile.write(body)


def _parsed(body):
    try:
        return dict(json.loads(body))
    except ValueError:
        return {}


def main(directory, port, profile, *faults):
    os.setpgrp()  # so that both are killed together
    server = Server(Path(directory), profile, set(faults), lease=SHORT_LEASE, port=int(port))
    if "loses-on-restart" in faults:
        with server.transaction() as database:
            database.execute("DELETE FROM records")
    (server.directory / "listens").touch()
    if os.fork() == 0:  # it accepts from the same socket
        server.serve_forever()
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
