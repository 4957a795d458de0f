"""A second set of wrong and right servers, listed from the draft and from known faults before the cases were read.

Each is a small change of a server with an operation that takes time, processes that can be killed and frozen, and a
lease. A wrong server names the case that has to name it; or, in ``ESCAPES``, why it can't be judged from outside.
"""

import itertools
import json
import re
import threading
import time
import zlib
from dataclasses import dataclass
from uuid import UUID, uuid4

from .planted import PATIENCE
from .shops import Handler, Record, Reply, Right, problem


class StoreHandler(Handler):
    def do_GET(self):  # noqa: N802 - the base class looks for it
        if self.path == "/count":
            super().do_GET()
        else:
            self.do_POST()

    def do_POST(self):  # noqa: N802 - as above
        length = int(self.headers["Content-Length"] or 0)
        if early := self.server.answer_early(self.headers, self.path):
            self.send(early)
            if self.close_connection:
                self.rfile.read(length)
        else:
            super().do_POST()

    do_PUT = do_PATCH = do_POST  # noqa: N815 - the base class looks for them

    def send(self, reply):
        fields = {"Content-Type": "application/json", "Content-Length": str(len(reply.body)), **reply.headers}
        self.send_response(reply.status)
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply.body)


class Store(Right):
    """Conforms to the draft. A claim ends with the process that holds it, unless ``crash`` says otherwise."""

    handler = StoreHandler
    #: How long the operation takes, and how long a lease outlives its process, in seconds.
    takes, lease = 0.0, 0.0
    #: Whether the cases that kill and freeze the server are tried, what the server declares, and its method.
    is_struck, declared = False, ()
    method = "POST"
    #: Why it can't be judged, if it is wrong.
    escapes = None

    def __init__(self):
        super().__init__()
        self.RequestHandlerClass = self.handler
        self.process, self.is_down, self.connections = 0, False, set()
        self.thawed, self.cold = threading.Event(), set()
        self.thawed.set()

    def verify_request(self, request, client_address):
        self.connections.add(request)
        return not self.is_down

    def shutdown_request(self, request):
        self.connections.discard(request)
        super().shutdown_request(request)

    def answer_early(self, headers, path):
        """The answer to a request whose body is not read, or None."""

    def kill(self):
        with self.lock:
            self.process, self.is_down = self.process + 1, True
            for scope, record in [*self.records.items()]:
                if record.reply is None:
                    self.crash(scope, record)
        for connection in [*self.connections]:
            self.shutdown_request(connection)

    def restart(self):
        self.is_down = False

    def freeze(self):
        with self.lock:
            self.thawed.clear()
            self.cold = {id(record) for record in self.records.values() if record.reply is None}
            for record in self.records.values():
                record.until = time.monotonic() + self.lease

    def thaw(self):
        self.thawed.set()

    def crash(self, scope, record):
        del self.records[scope]

    def find(self, scope):
        record = super().find(scope)
        if record and record.reply is None and getattr(record, "until", PATIENCE + time.monotonic()) < time.monotonic():
            return None
        return record

    def work(self, process, record):
        """Take some time. The process may be killed or frozen meanwhile."""
        time.sleep(self.takes)
        if id(record) in self.cold:
            self.thawed.wait(PATIENCE)
        self.survive(process)

    def survive(self, process):
        if process != self.process:
            raise ConnectionResetError

    def run(self, sent, scope, record):
        process = self.process
        self.meet()
        self.work(process, record)
        with self.lock:
            self.survive(process)
            if not self.is_owner(scope, record):
                raise ConnectionResetError
            return self.finish(sent, scope, record)

    def is_owner(self, scope, record):
        return self.records.get(scope) is record

    def finish(self, sent, scope, record):
        reply = self.operate(sent)
        self.complete(scope, record, reply)
        return reply

    def operate(self, sent):
        reply = super().operate(sent)
        if reply.status < 300:
            reply.headers["Location"] = f"/charges/{reply.members['id']}"
        return reply


@dataclass
class Raw(Reply):
    """A reply with any bytes as its body."""

    raw: bytes = b""

    @property
    def body(self):
        return self.raw


def changed(reply, status=None, raw=None, without=(), **members):
    """A reply like another one."""
    headers = {name: value for name, value in reply.headers.items() if name not in without}
    raw = reply.body if raw is None else raw
    return Raw(status or reply.status, members or reply.members, headers, raw=raw)


# Wrong servers: when the effect and its record happen


class ChecksThenInserts(Store):
    named = "concurrent-2"

    def protect(self, sent, scope):
        if scope in self.records:
            return super().protect(sent, scope)
        self.meet()
        reply = self.operate(sent)
        self.records[scope] = Record(self.content(sent), reply)
        return reply


class LocksInTheProcess(Store):
    """Two workers share the records, but not the locks."""

    named = "concurrent-2"

    def __init__(self):
        super().__init__()
        self.workers = itertools.cycle([{}, {}])

    def protect(self, sent, scope):
        with self.lock:
            locks, record = next(self.workers), self.records.get(scope)
        if record:
            return super().protect(sent, scope)
        if locks.setdefault(scope, sent) is not sent:
            self.meet()
            return self.refuse_running(sent, scope, record)
        self.meet()
        record = Record(self.content(sent))
        record.reply = self.operate(sent)
        self.records[scope] = record
        del locks[scope]
        return record.reply


class LeaseEndsEarly(Store):
    """The lease is shorter than the operation, and no fence stops the first one."""

    named = "concurrent-2"

    def refuse_running(self, sent, scope, record):
        return self.operate(sent)


class DoesNotLookAgain(Store):
    """A duplicate waits for the lock, but looked for the record before it had the lock."""

    named = "concurrent-2"

    def refuse_running(self, sent, scope, record):
        self.lock.release()
        try:
            while record.reply is None:
                time.sleep(0.005)  # as a real one polls its lock
        finally:
            self.lock.acquire()
        return self.operate(sent)


class LoserUnlocks(Store):
    """A refused duplicate deletes the lock of the first request."""

    named = "concurrent-20"

    def protect(self, sent, scope):
        with self.lock:
            record = self.records.get(scope)
            if record is None or record.reply is not None or record.content != self.content(sent):
                return_early = False
            else:
                del self.records[scope]
                return_early = True
        if return_early:
            self.meet()
            return problem(409, "in progress", Retry_After="1")
        return super().protect(sent, scope)

    def is_owner(self, scope, record):
        return True

    def complete(self, scope, record, reply):
        super().complete(scope, record, reply)
        if reply.is_final:
            self.records[scope] = record


class LoserIsRecorded(Store):
    named = "concurrent-2"

    def refuse_running(self, sent, scope, record):
        record.refused = super().refuse_running(sent, scope, record)
        return record.refused

    def replay(self, sent, scope, record):
        return getattr(record, "refused", record.reply)


class LoserBreaks(Store):
    """The unique key of its table makes a duplicate an error."""

    named = "concurrent-2"

    def refuse_running(self, sent, scope, record):
        return Reply(500, {"error": "duplicate key value violates unique constraint"})


class WaitersGetNothing(Store):
    named = "concurrent-2"

    def refuse_running(self, sent, scope, record):
        return Reply(204, {})


class RecordLags(Store):
    """Retries read a replica that is late."""

    named = "sequential"

    def protect(self, sent, scope):
        record = self.records.get(scope)
        if record and record.reply and time.monotonic() < record.seen:
            return self.operate(sent)
        return super().protect(sent, scope)

    def complete(self, scope, record, reply):
        super().complete(scope, record, reply)
        record.seen = time.monotonic() + 0.05


class RunsBehindTheReplay(Store):
    named = "sequential"

    def replay(self, sent, scope, record):
        self.operate(sent)
        return record.reply


class EnqueuesAgain(Store):
    """A retry gets the record, and a worker does the work again later."""

    named = "sequential"

    def replay(self, sent, scope, record):
        threading.Timer(0.2, self.operate, [sent]).start()
        return record.reply


class FailsAfterTheEffect(Store):
    named = "server-error"

    def operate(self, sent):
        reply = super().operate(sent)
        self.effects += reply.status == 500
        return reply


class ForgetsSoon(Store):
    """Its clock runs with the requests, and its retention is shorter than the run."""

    named, retention = "remembered", 400

    def __init__(self):
        super().__init__()
        self.now, self.ends = 0, {}

    def find(self, scope):
        self.now += 1
        return super().find(scope) if self.now <= self.ends.setdefault(scope, self.now + self.retention) else None


# Wrong servers: what a retry gets


class TruncatesTheBody(Store):
    named, verdict = "replay-is-equal", "deviates"

    def replay(self, sent, scope, record):
        return changed(record.reply, raw=record.reply.body[:20])


class EncodesTwice(Store):
    named, verdict = "replay-is-equal", "deviates"

    def replay(self, sent, scope, record):
        return changed(record.reply, raw=json.dumps(record.reply.body.decode()).encode())


class LosesLocation(Store):
    named, verdict = "replay-is-equal", "deviates"

    def replay(self, sent, scope, record):
        return changed(record.reply, without=["Location"])


class LosesContentType(Store):
    named, verdict = "replay-is-equal", "deviates"

    def replay(self, sent, scope, record):
        reply = changed(record.reply)
        reply.headers["Content-Type"] = "text/html; charset=utf-8"
        return reply


class LosesTheStatus(Store):
    named, verdict = "replay-is-equal", "deviates"

    def replay(self, sent, scope, record):
        return changed(record.reply, 200 if record.reply.status < 300 else None)


class LosesTheStatusOfErrors(Store):
    named = "client-error"

    def replay(self, sent, scope, record):
        return changed(record.reply, 200) if record.reply.status >= 400 else record.reply


class SaysAlreadyProcessed(Store):
    named, verdict = "replay-is-equal", "deviates"

    def replay(self, sent, scope, record):
        return Reply(200, {"detail": "already processed"}) if record.reply.status < 300 else record.reply


class RendersAgain(Store):
    """A retry is rendered from the current state."""

    named, verdict = "replay-is-equal", "deviates"

    def replay(self, sent, scope, record):
        return changed(record.reply, raw=json.dumps({**record.reply.members, "at": uuid4().hex}).encode())


class SendsTheOldLength(Store):
    """The body is rendered again, and the recorded Content-Length is longer."""

    named = "sequential"

    def replay(self, sent, scope, record):
        reply = changed(record.reply, raw=json.dumps(record.reply.members, separators=(",", ":")).encode())
        reply.headers["Content-Length"] = str(len(record.reply.body))
        return reply


class DropsTheRetry(Store):
    """A retry breaks its worker, so that no answer arrives."""

    named = "sequential"

    def replay(self, sent, scope, record):
        raise ConnectionResetError


class RedirectsTheRetry(Store):
    named = "concurrent-2"

    def replay(self, sent, scope, record):
        return Reply(303, {}, {"Location": "/charges/1"})


class HangsAfterARefusal(Store):
    named = "client-error"

    def complete(self, scope, record, reply):
        if reply.status != 402:
            super().complete(scope, record, reply)


# Wrong servers: which requests are the same


class IgnoresThePayload(Store):
    named = "other-payload"

    def content(self, sent):
        return ""


class PayloadIsInTheScope(Store):
    named = "other-payload"

    def scope(self, sent, key):
        return (*super().scope(sent, key), sent.body)


class RunsAndThenRefusesKeyless(Store):
    named = "missing-key"

    def answer(self, sent):
        if "Idempotency-Key" not in sent.headers:
            self.operate(sent)
        return super().answer(sent)


class AnotherAccountIsAConflict(Store):
    """A unique key that doesn't name the account."""

    named, verdict = "other-account", "deviates"

    def protect(self, sent, scope):
        if any(other[-1] == scope[-1] and other[0] != scope[0] for other in [*self.records]):
            self.meet()
            return problem(409, "in use", Retry_After="1")
        return super().protect(sent, scope)


class LocksTheKeyAlone(Store):
    """Records name the account, but the lock doesn't."""

    named, verdict = "other-account-in-flight", "deviates"

    def protect(self, sent, scope):
        running = [other for other, record in [*self.records.items()] if record.reply is None]
        if any(other[-1] == scope[-1] and other[0] != scope[0] for other in running):
            self.meet()
            return problem(409, "in use", Retry_After="1")
        return super().protect(sent, scope)


class ReplaysToStrangers(Store):
    """Looks for the record before it checks the credentials."""

    named = "no-credentials"

    def answer(self, sent):
        found = [record for scope, record in [*self.records.items()] if scope[-1] == self.key_of(sent)]
        if sent.account is None and found and found[0].reply:
            return found[0].reply
        return super().answer(sent)


class ListsItsCharges(Store):
    """A GET is another operation."""

    def answer(self, sent):
        if sent.method == "GET" and sent.account:
            replies = [record.reply for record in [*self.records.values()] if record.reply]
            return Reply(200, {"items": [reply.members for reply in replies]})
        return super().answer(sent)


class ReplaysToItsReaders(ListsItsCharges):
    named = "other-method: GET"

    def answer(self, sent):
        found = [record for scope, record in [*self.records.items()] if scope[-1] == self.key_of(sent)]
        return found[0].reply if sent.method == "GET" and found else super().answer(sent)


class ReplaysToReaders(Store):
    """A GET with the key of a POST gets the answer of the POST."""

    named = "other-method: GET"

    def answer(self, sent):
        found = [record for scope, record in [*self.records.items()] if scope[-1] == self.key_of(sent)]
        return found[0].reply if sent.method == "GET" and found else super().answer(sent)


class AcceptIsInTheContent(Store):
    """Its fingerprint includes the header fields, except those that a proxy adds."""

    named = "another-instance: Accept"

    def content(self, sent):
        return super().content(sent), sent.headers["Accept"]


class TitleCaseOnly(Store):
    """Looks the field up in a mapping with the names as they are sent."""

    named = "another-instance: lower case"

    def key_of(self, sent):
        return super().key_of(sent) if "Idempotency-Key" in [*sent.headers.keys()] else None


class IgnoresChunks(Store):
    """A chunked body is taken for an empty one."""

    named = "another-instance: chunked"

    def answer(self, sent):
        sent.body = b"" if sent.is_chunked else sent.body
        return super().answer(sent)


class DashBlind(Store):
    named = "similar-keys: -"

    def key_of(self, sent):
        return (super().key_of(sent) or "").replace("-", "") or None


class UnquotesKeys(Store):
    """Takes the key for a part of a URL."""

    named = "similar-keys: %41"

    def key_of(self, sent):
        return re.sub("%([0-9A-F]{2})", lambda found: chr(int(found[1], 16)), super().key_of(sent) or "") or None


class KeysAreFileNames(Store):
    named = "similar-keys: /"

    def key_of(self, sent):
        return (super().key_of(sent) or "").rpartition("/")[2] or None


class BreaksOnLongKeys(Store):
    """The column has 255 characters."""

    named = "similar-keys: character 300"

    def protect(self, sent, scope):
        return Reply(500, {"error": "value too long"}) if len(scope[-1]) > 255 else super().protect(sent, scope)


class BreaksOnPercent(Store):
    named = "similar-keys: %"

    def protect(self, sent, scope):
        return Reply(500, {"error": "unsupported format"}) if "%" in scope[-1] else super().protect(sent, scope)


class LeavesTheBodyUnread(Store):
    """A retry is answered before its body is read, so the next request on the connection is misread."""

    named = "one-connection"

    def answer_early(self, headers, path):
        found = [record for scope, record in [*self.records.items()] if f'"{scope[-1]}"' == headers["Idempotency-Key"]]
        is_own = headers["Authorization"] == "alice" and path == "/charges"
        return found[0].reply if is_own and found and headers["Connection"] == "keep-alive" else None

    def replay(self, sent, scope, record):
        return record.reply


# Wrong servers: crashes


class Struck(Store):
    is_struck = True


class ForgetsWithItsProcess(Struck):
    named = "restarted"

    def kill(self):
        super().kill()
        self.records.clear()


class BlocksAfterAKill(Struck):
    named = "killed-early"

    def crash(self, scope, record):
        pass


class BreaksAfterAKill(Struck):
    named = "killed-early"

    def crash(self, scope, record):
        record.is_broken = True

    def refuse_running(self, sent, scope, record):
        return Reply(500, {}) if hasattr(record, "is_broken") else super().refuse_running(sent, scope, record)


class RecordsBeforeTheEffect(Struck):
    named = "killed-early"

    def run(self, sent, scope, record):
        process = self.process
        self.meet()
        if "outcome" not in sent.members:
            record.reply = Reply(201, {"id": uuid4().hex})
        self.work(process, record)
        with self.lock:
            if record.reply:
                self.operate(sent)
                return record.reply
            return self.finish(sent, scope, record)


class ForgetsTheEffect(Struck):
    """The effect is committed early, and the record with the answer."""

    named = "killed-early"

    def run(self, sent, scope, record):
        process = self.process
        self.meet()
        reply = self.operate(sent)
        self.work(process, record)
        with self.lock:
            self.survive(process)
            self.complete(scope, record, reply)
        return reply


class HasNoFence(Struck):
    named, lease = "frozen-while-it-runs", 0.3

    def is_owner(self, scope, record):
        return True


class NeverTakesOver(Struck):
    """A frozen process keeps its claim, and its client is gone."""

    named = "killed-early"

    def crash(self, scope, record):
        record.reply = problem(409, "unfinished")


class AbortsOnACut(Store):
    """The claim of an aborted request is never released."""

    named = "cut-after-the-end"

    def lose(self, sent):
        self.records[self.scope(sent, self.key_of(sent))].reply = None


# Right servers


class Unchanged(Struck):
    """Its claims end with its process."""


class HasALease(Struck):
    lease = 0.3

    def crash(self, scope, record):
        record.until = time.monotonic() + self.lease


class LimitsRetries(Store):
    """Each second use of a key within a second is shed."""

    def protect(self, sent, scope):
        with self.lock:
            record = self.records.get(scope)
            is_shed = record is not None and record.reply is not None and not getattr(record, "was_shed", False)
            if record is not None and record.reply is not None:
                record.was_shed = is_shed
        if is_shed:
            self.meet()
            return problem(429, "slow down", Retry_After="0")
        return super().protect(sent, scope)


class LimitsConcurrency(Store):
    """More than eight requests of an account at once are shed."""

    def answer(self, sent):
        with self.lock:
            self.running += 1
            is_shed = self.running > 8
        try:
            if is_shed:
                self.meet()
                return problem(503, "busy", Retry_After="0")
            return super().answer(sent)
        finally:
            with self.lock:
                self.running -= 1

    def run(self, sent, scope, record):
        self.meet()
        with self.lock:
            return self.finish(sent, scope, record)


class GivesUpAndFinishes(Store):
    """Each fifth operation exceeds its deadline: it is answered 503, while the work goes on."""

    def run(self, sent, scope, record):
        self.running += 1
        if self.running % 5:
            return super().run(sent, scope, record)
        threading.Timer(0.02, super().run, [sent, scope, record]).start()
        return problem(503, "timeout", Retry_After="0")

    def meet(self):
        """Its requests don't wait for each other: it has a deadline."""


class RendersDifferently(Store):
    """Stores JSON, not bytes."""

    def replay(self, sent, scope, record):
        members = dict(reversed(record.reply.members.items()))
        return changed(record.reply, raw=json.dumps(members, indent=2).encode())


class ConflictsOnReuse(Store):
    declared = ("reused=409",)

    def refuse_reuse(self, sent, scope, record):
        return problem(409, "reused")


class KeyIsOptional(Store):
    declared = ("missing=none",)

    def answer(self, sent):
        if sent.account and sent.method == "POST" and "Idempotency-Key" not in sent.headers:
            return self.operate(sent)
        return super().answer(sent)


class TakesUuidsOnly(Store):
    def key_of(self, sent):
        try:
            return str(UUID(super().key_of(sent) or ""))
        except ValueError:
            return None


class RefusesLongKeys(Store):
    def key_of(self, sent):
        key = super().key_of(sent)
        return key if key and len(key) <= 64 else None


class PathIsInTheContent(Store):
    """A key belongs to the account, under every path."""

    def scope(self, sent, key):
        return (sent.account, key)

    def content(self, sent):
        return super().content(sent), sent.path


class ReleasesRefusals(Store):
    """A 4xx is not recorded, as it documents."""

    declared = ("client-error=fresh",)

    def complete(self, scope, record, reply):
        reply.is_final = reply.status < 300
        super().complete(scope, record, reply)


class LinksToItsRules(Store):
    """Its refusals have a text, and a link to the documentation."""

    def refuse_running(self, sent, scope, record):
        headers = {"Content-Type": "text/plain", "Link": '</rules>; rel="describedby"', "Retry-After": "1"}
        return Raw(409, {}, headers, raw=b"in progress")


class BehindAProxy(Store):
    """A proxy adds header fields to each answer."""

    def answer(self, sent):
        reply = super().answer(sent)
        more = {"X-Request-Id": uuid4().hex, "Via": "1.1 proxy", "Server-Timing": f"app;dur={time.monotonic()}"}
        reply = changed(reply)
        reply.headers |= more | {"Set-Cookie": f"s={uuid4().hex}"}
        return reply


class _Closing(StoreHandler):
    protocol_version = "HTTP/1.0"


class _Chunking(StoreHandler):
    def send(self, reply):
        self.send_response(reply.status)
        for name, value in {"Content-Type": "application/json", **reply.headers}.items():
            self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in filter(None, (reply.body[:7], reply.body[7:])):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        self.wfile.write(b"0\r\n\r\n")


class Closes(Store):
    handler = _Closing


class Chunks(Store):
    handler = _Chunking


class ClosesSilently(Store):
    """Closes each connection without a field that says so."""

    class handler(StoreHandler):  # noqa: N801 - the server looks for it
        def send(self, reply):
            super().send(reply)
            self.close_connection = True


class ShowsTheLastCharge(Store):
    """A GET shows what a PUT wrote, in the form of the answer to the PUT."""

    method, last = "PUT", None

    def answer(self, sent):
        if sent.method == "GET" and sent.account:
            return self.last or Reply(404, {})
        sent.method = "POST" if sent.method == "PUT" else "PATCH"
        self.last = super().answer(sent)
        return self.last


class StartsSlowly(Store):
    """Its first request takes long."""

    def run(self, sent, scope, record):
        time.sleep(0 if self.effects else 0.5)
        return super().run(sent, scope, record)


# Escapes


class HashesKeys(Store):
    escapes = "two keys with one hash are not found by trying"

    def key_of(self, sent):
        key = super().key_of(sent)
        return key and str(zlib.crc32(key.encode()))


class ComparesAPrefix(Store):
    escapes = "the payloads of a run are short"

    def content(self, sent):
        return sent.body[:1024]


class ComparesText(Store):
    escapes = 'whether 1 and "1" are two payloads depends on the operation'

    def content(self, sent):
        return json.dumps({name: str(value) for name, value in sent.members.items()}, sort_keys=True)


class CookieIsInTheContent(Store):
    escapes = "a cookie may be a credential, so the suite varies none"

    def content(self, sent):
        return super().content(sent), sent.headers["Cookie"]


class IgnoresTheQuery(Store):
    escapes = "whether a query belongs to the payload depends on the operation"

    def scope(self, sent, key):
        return (sent.account, sent.method, sent.path.partition("?")[0], key)


class ForgetsLater(ForgetsSoon):
    named, escapes = None, "the run is over by then, and --ttl waits for the retention that the server documents"
    retention = 10_000


class WaitsForAMinute(Store):
    """A duplicate that has waited for a minute runs."""

    escapes = "the operation of a run is shorter than the wait"

    def refuse_running(self, sent, scope, record):
        self.lock.release()
        try:
            deadline = time.monotonic() + 60
            while record.reply is None and scope in self.records and time.monotonic() < deadline:
                time.sleep(0.005)  # as a real one polls its record
        finally:
            self.lock.acquire()
        if record.content != self.content(sent):
            return problem(422, "reused")
        return record.reply or (self.operate(sent) if time.monotonic() > deadline else problem(409, "running"))


def _below(parent):
    for each in parent.__subclasses__():
        yield each
        yield from _below(each)


ALL = sorted(_below(Store), key=lambda each: each.__name__)
WRONG = [each for each in ALL if each.named]
ESCAPES = [each for each in ALL if each.escapes]
RIGHT = [each for each in ALL if each not in (*WRONG, *ESCAPES, Struck)]
