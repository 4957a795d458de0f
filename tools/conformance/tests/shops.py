"""Servers in memory, each a small change of one that conforms to the draft: the wrong ones and the right ones.

They are independent of ``planted.py``, so that the suite is not fitted to one implementation. A wrong server names the
case that has to name it.
"""

import contextlib
import json
import re
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from uuid import uuid4

from .planted import PATIENCE

ACCOUNTS = {"alice": "alice", "alice-2": "alice", "bob": "bob"}


@dataclass
class Sent:
    """A request."""

    method: str
    path: str
    headers: object
    body: bytes
    is_chunked: bool

    @property
    def account(self):
        return ACCOUNTS.get(self.headers["Authorization"])

    @property
    def members(self):
        try:
            return json.loads(self.body)
        except ValueError:
            return {}


@dataclass
class Reply:
    status: int
    members: dict
    headers: dict = field(default_factory=dict)
    #: Whether it may be recorded.
    is_final: bool = True

    @property
    def body(self):
        return json.dumps(self.members).encode() if self.members else b""


@dataclass
class Record:
    content: object
    reply: Reply | None = None
    uses: int = 0


def problem(status, title, **headers):
    content = {"Content-Type": "application/problem+json"}
    return Reply(
        status, {"title": title, "status": status}, content | {k.replace("_", "-"): v for k, v in headers.items()}
    )


class Right(ThreadingHTTPServer):
    """Conforms to the draft."""

    #: The case that must name this server, if it is wrong, the verdict, and a part of its cause.
    named = None
    verdict = "failed"
    request_queue_size = 512
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.RLock()
        self.gate = threading.Condition()
        self.awaited = self.running = self.effects = 0
        self.records = {}
        self.cuts_next = False
        #: How many requests are answered 429 before their body.
        self.sheds_heads = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        """Ignore clients that cut their connection."""

    def expect(self, count):
        with self.gate:
            self.awaited = count

    def meet(self):
        with self.gate:
            self.awaited -= 1
            self.gate.notify_all()
            self.gate.wait_for(lambda: self.awaited <= 0, PATIENCE)

    # What wrong servers change.

    def key_of(self, sent):
        """The key, or None if it is malformed."""
        values = sent.headers.get_all("Idempotency-Key") or []
        found = re.fullmatch(r'"([\x20\x21\x23-\x7e]+)"', values[0]) if len(values) == 1 else None
        return found and found[1]

    def scope(self, sent, key):
        return (sent.account, sent.method, sent.path, key)

    def content(self, sent):
        return json.dumps(sent.members, sort_keys=True)

    def find(self, scope):
        return self.records.get(scope)

    def refuse_reuse(self, sent, scope, record):
        return problem(422, "reused")

    def refuse_running(self, sent, scope, record):
        return problem(409, "in progress", Retry_After="1")

    def replay(self, sent, scope, record):
        return record.reply

    def lose(self, sent):
        """Notice that the client of ``sent`` is gone."""

    def complete(self, scope, record, reply):
        if reply.is_final:
            record.reply = reply
        else:
            self.records.pop(scope, None)

    def count(self):
        return Reply(200, {"effects": self.effects})

    def operate(self, sent):
        outcome = sent.members.get("outcome", 201)
        if outcome >= 400:
            return Reply(outcome, {"error": uuid4().hex}, is_final=outcome < 500 and outcome != 429)
        self.effects += 1
        return Reply(outcome, {"id": uuid4().hex})

    def answer(self, sent):
        if sent.account is None:
            return problem(401, "stranger")
        if sent.method != "POST":
            return problem(405, "method")
        key = self.key_of(sent)
        if key is None:
            return problem(400, "key")
        return self.protect(sent, self.scope(sent, key))

    def protect(self, sent, scope):
        content = self.content(sent)
        with self.lock:
            record = self.find(scope)
            if record is None:
                record, state = Record(content), "run"
                self.records[scope] = record
            elif record.content != content:
                state = "reused" if record.reply else "running"
            else:
                state = "replay" if record.reply else "running"
            record.uses += 1
        if state == "run":
            return self.run(sent, scope, record)
        self.meet()
        with self.lock:
            if state == "running":
                return self.refuse_running(sent, scope, record)
            return (self.replay if state == "replay" else self.refuse_reuse)(sent, scope, record)

    def run(self, sent, scope, record):
        with self.lock:
            self.running += 1
        self.meet()
        with self.lock:
            self.running -= 1
            reply = self.operate(sent)
            self.complete(scope, record, reply)
        return reply


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.send(self.server.count())

    def do_POST(self):
        shop = self.server
        if shop.sheds_heads:
            shop.sheds_heads -= 1
            self.close_connection = True
            self.send(problem(429, "slow down", Retry_After="0"))
            return
        is_chunked = self.headers["Transfer-Encoding"] == "chunked"
        body, is_whole = self.chunks() if is_chunked else self.plain()
        if not (is_whole or getattr(shop, "runs_halves", False)):
            self.close_connection = True
            return
        is_cut, shop.cuts_next = shop.cuts_next, False
        sent = Sent(self.command, self.path, self.headers, body, is_chunked)
        reply = shop.answer(sent)
        if is_cut:
            with contextlib.suppress(ConnectionResetError):
                self.connection.recv(1, socket.MSG_PEEK)  # until the client is gone
            shop.lose(sent)
        self.send(reply)

    do_PUT = do_PATCH = do_POST  # noqa: N815 - the base class looks for them

    def plain(self):
        length = int(self.headers["Content-Length"])
        body = self.rfile.read(length)
        return body, len(body) == length

    def chunks(self):
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body, True

    def send(self, reply):
        self.send_response(reply.status)
        for name, value in {"Content-Type": "application/json", **reply.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body)


# Right servers


class Waits(Right):
    """A duplicate waits for the result."""

    def refuse_running(self, sent, scope, record):
        self.lock.release()
        try:
            while record.reply is None and scope in self.records:
                time.sleep(0.005)  # as a real one polls its record
        finally:
            self.lock.acquire()
        if record.reply is None or record.content != self.content(sent):
            return problem(409, "in progress", Retry_After="1")
        return record.reply


class ComparesBytes(Right):
    """The same JSON with other white space is another payload."""

    def content(self, sent):
        return sent.body


class WantsALength(Right):
    def answer(self, sent):
        return problem(411, "length") if sent.is_chunked else super().answer(sent)


class Limited(Right):
    """A rate limit before everything else: 40 requests in each half second."""

    status, wait, limit, window = 429, "1", 40, 0.5

    def __init__(self):
        super().__init__()
        self.window_began, self.in_window, self.times_shed = time.monotonic(), 0, 0

    def answer(self, sent):
        with self.lock:
            if time.monotonic() > self.window_began + self.window:
                self.window_began, self.in_window = time.monotonic(), 0
            self.in_window += 1
            if self.in_window > self.limit:
                self.times_shed += 1
                with self.gate:  # this request has come
                    self.awaited -= 1
                    self.gate.notify_all()
                return problem(self.status, "slow down", **({"Retry_After": self.wait} if self.wait else {}))
        return super().answer(sent)


class Overloaded(Limited):
    status = 503


class LimitedSilently(Limited):
    wait = None


class ShedsDuplicates(Right):
    """Its gateway answers 429 while the same key is in use."""

    def refuse_running(self, sent, scope, record):
        return problem(429, "slow down", Retry_After="0")


RIGHT = [Right, Waits, ComparesBytes, WantsALength, Limited, Overloaded, LimitedSilently, ShedsDuplicates]


# Wrong servers


class ForgetsAfterARefusal(Right):
    named = "other-payload"

    def refuse_reuse(self, sent, scope, record):
        del self.records[scope]
        return super().refuse_reuse(sent, scope, record)


class RunsWhatItRefuses(Right):
    named = "other-payload"

    def refuse_reuse(self, sent, scope, record):
        self.operate(sent)
        return super().refuse_reuse(sent, scope, record)


class ExecutesAndThenRefuses(Right):
    named = "concurrent-2"

    def refuse_running(self, sent, scope, record):
        self.operate(sent)
        return super().refuse_running(sent, scope, record)


class RecordsTheRefusal(Right):
    named, verdict = "other-payload", "deviates"

    def refuse_reuse(self, sent, scope, record):
        record.reply = super().refuse_reuse(sent, scope, record)
        return record.reply


class LastPayloadWins(Right):
    named = "other-payload"

    def refuse_reuse(self, sent, scope, record):
        record.content = self.content(sent)
        record.reply = self.operate(sent)
        return record.reply


class ShowsTheFirst(Right):
    named = "other-payload"

    def refuse_reuse(self, sent, scope, record):
        reply = super().refuse_reuse(sent, scope, record)
        reply.members["first"] = record.reply.members
        return reply


class Scoped(Right):
    """A wrong field in the scope of a key."""

    header = ""

    def scope(self, sent, key):
        return (*super().scope(sent, key), sent.headers[self.header])


class ScopedByAgent(Scoped):
    named, header = "another-instance: User-Agent", "User-Agent"


class ScopedByTrace(Scoped):
    named, header = "another-instance: traceparent", "traceparent"


class ScopedByCredential(Scoped):
    named, header = "another-credential", "Authorization"


class AgentInContent(Right):
    named = "another-instance: User-Agent"

    def content(self, sent):
        return super().content(sent), sent.headers["User-Agent"]


class TraceInContent(Right):
    named = "another-instance: traceparent"

    def content(self, sent):
        return super().content(sent), sent.headers["traceparent"]


class RequestIdIsTheKey(Right):
    named = "another-instance: X-Request-Id"

    def key_of(self, sent):
        return sent.headers["X-Request-Id"] or super().key_of(sent)


class ScopedByLength(Right):
    named = "another-instance: white space"

    def scope(self, sent, key):
        return (*super().scope(sent, key), len(sent.body))


class ChunkedIsUnprotected(Right):
    named = "another-instance: chunked"

    def protect(self, sent, scope):
        return self.operate(sent) if sent.is_chunked else super().protect(sent, scope)


class CredentialInContent(Right):
    named = "another-credential"

    def content(self, sent):
        return super().content(sent), sent.headers["Authorization"]


class Remembers(Right):
    named = "hundred-keys-between"
    limit = 50

    def find(self, scope):
        while len(self.records) > self.limit:
            self.records.pop(next(iter(self.records)))
        return super().find(scope)


class RemembersAHundred(Remembers):
    limit = 99


class OneAtATime(Right):
    named = "two-keys"

    def protect(self, sent, scope):
        with self.lock:
            others = [other for other, record in self.records.items() if record.reply is None and other != scope]
            if any(other[0] == sent.account for other in others):
                with self.gate:
                    self.awaited -= 1
                    self.gate.notify_all()
                return problem(409, "busy", Retry_After="0")
        return super().protect(sent, scope)


class SharesTheLastReply(Right):
    """A global variable holds the reply of the request that ended last."""

    named = "two-keys"
    last = None

    def run(self, sent, scope, record):
        self.last = super().run(sent, scope, record)
        self.meet_again()
        return self.last

    def meet_again(self):
        with self.gate:
            self.awaited -= 1
            self.gate.notify_all()
            self.gate.wait_for(lambda: self.awaited <= -4, 0.05)


class UnlocksUnderLoad(Right):
    named = "load"

    def protect(self, sent, scope):
        with self.lock:
            self.running += 1
            is_loaded = self.running > 1
        try:
            with self.gate:
                self.gate.wait_for(lambda: False, 0.02)  # the work of a request
            record = self.records.get(scope)
            return self.operate(sent) if is_loaded and record and record.reply else super().protect(sent, scope)
        finally:
            with self.lock:
                self.running -= 1


class RefusalBindsEveryone(Right):
    named, verdict = "other-account-after-a-refusal", "deviates"

    def __init__(self):
        super().__init__()
        self.poisoned = set()

    def refuse_reuse(self, sent, scope, record):
        self.poisoned.add(scope[-1])
        return super().refuse_reuse(sent, scope, record)

    def protect(self, sent, scope):
        is_new = scope not in self.records
        return problem(422, "poisoned") if is_new and scope[-1] in self.poisoned else super().protect(sent, scope)


class ErrorsBindEveryone(Right):
    named, verdict = "other-account-after-a-refusal", "deviates"

    def __init__(self):
        super().__init__()
        self.errors = {}

    def complete(self, scope, record, reply):
        super().complete(scope, record, reply)
        if reply.status == 402:
            self.errors[scope[-1]] = reply

    def protect(self, sent, scope):
        return self.errors.get(scope[-1]) or super().protect(sent, scope)


class LimitsTheKey(Right):
    """A retry is answered 429, although other operations run."""

    named = "sequential"

    def replay(self, sent, scope, record):
        return problem(429, "slow down", Retry_After="1")


class LimitsTheKeySilently(Right):
    named = "sequential"

    def replay(self, sent, scope, record):
        return problem(503, "busy")


class RepliesNotModified(Right):
    named = "concurrent-2"

    def replay(self, sent, scope, record):
        return Reply(304, {})


class RepliesEmpty(Right):
    named = "replay-is-equal"
    verdict = "deviates"

    def replay(self, sent, scope, record):
        return Reply(record.reply.status, {})


class ConflictsForever(Right):
    named = "concurrent-2"

    def replay(self, sent, scope, record):
        return problem(409, "processed", Retry_After="1")


class HangsAfterAnError(Right):
    named = "server-error"

    def complete(self, scope, record, reply):
        if reply.status != 500:
            super().complete(scope, record, reply)


class SucceedsAfterAnError(Right):
    named = "server-error"

    def complete(self, scope, record, reply):
        record.reply = Reply(201, {"id": uuid4().hex}) if reply.status == 500 else reply


class ReplaysOnce(Right):
    named = "sequential"

    def replay(self, sent, scope, record):
        del self.records[scope]
        return record.reply


class ReplaysTwice(Right):
    named = "sequential"

    def replay(self, sent, scope, record):
        if record.uses > 3:
            return self.operate(sent)
        return record.reply


class Anonymous(Right):
    named = "no-credentials"

    def answer(self, sent):
        if sent.account is None:
            sent.headers["Authorization"] = "alice"
        return super().answer(sent)


class MethodBlind(Right):
    named = "other-method: PUT"

    def answer(self, sent):
        sent.method = "POST"
        return super().answer(sent)


class PathBlind(Right):
    named = "other-path"

    def scope(self, sent, key):
        return (sent.account, sent.method, key)


class AccountBlind(Right):
    named = "other-account"

    def scope(self, sent, key):
        return (sent.method, sent.path, key)


class BothPayloadsRun(Right):
    named = "other-payload-in-flight"

    def refuse_running(self, sent, scope, record):
        if record.content != self.content(sent):
            return self.operate(sent)
        return super().refuse_running(sent, scope, record)


class AnyPayloadWaits(Waits):
    named = "other-payload-in-flight"

    def refuse_running(self, sent, scope, record):
        reply = super().refuse_running(sent, scope, record)
        return record.reply or reply


class CutsKeys(Right):
    named = "similar-keys: character 36"

    def key_of(self, sent):
        return (super().key_of(sent) or "")[:35] or None


class FoldsKeys(Right):
    named = "similar-keys: case"

    def key_of(self, sent):
        return (super().key_of(sent) or "").casefold() or None


class StripsKeys(Right):
    named = "similar-keys: a blank at the end"

    def key_of(self, sent):
        return (super().key_of(sent) or "").strip() or None


class RunsHalves(Right):
    named = "cut-before-the-end"
    runs_halves = True


class ForgetsTheCut(Right):
    named = "cut-after-the-end"

    def lose(self, sent):
        with self.lock:
            self.records.pop(self.scope(sent, self.key_of(sent)), None)


class TakesBareKeys(Right):
    named, verdict = "key: bare", "deviates"

    def key_of(self, sent):
        values = sent.headers.get_all("Idempotency-Key") or []
        bare = re.fullmatch(r"[\w-]+", values[0]) if len(values) == 1 else None
        return bare[0] if bare else super().key_of(sent)


class TakesTheFirstKey(Right):
    named, verdict = "key: two fields", "deviates"

    def key_of(self, sent):
        values = sent.headers.get_all("Idempotency-Key") or []
        del sent.headers["Idempotency-Key"]
        for value in values[:1]:
            sent.headers["Idempotency-Key"] = value
        return super().key_of(sent)


class TakesNoKey(Right):
    named, verdict = "missing-key", "deviates"

    def key_of(self, sent):
        return super().key_of(sent) if "Idempotency-Key" in sent.headers else uuid4().hex


class WaitsForYears(Right):
    named = "retry-after"

    def refuse_running(self, sent, scope, record):
        return problem(409, "in progress", Retry_After="86400")


class BreaksOnReuse(Right):
    named = "other-payload"

    def refuse_reuse(self, sent, scope, record):
        return Reply(500, {"error": "integrity"})


class AcceptsTheDuplicate(Right):
    """A duplicate of a running request gets a success that reports nothing."""

    named = "concurrent-2"

    def refuse_running(self, sent, scope, record):
        return Reply(202, {"state": "queued"})


class CountsDuplicates(Right):
    """Each fifth retry of any key runs."""

    named = "sequential"
    retries = 0

    def replay(self, sent, scope, record):
        self.retries += 1
        return self.operate(sent) if self.retries % 5 == 2 else record.reply


def _below(parent):
    for each in parent.__subclasses__():
        yield each
        yield from _below(each)


WRONG = sorted({each for each in _below(Right) if each.named}, key=lambda each: each.__name__)
