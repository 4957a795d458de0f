"""The clients: threads with persistent connections that start operations, retry them and duplicate recent ones."""

import json
import random
import threading
import time
from array import array
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from uuid import uuid4

from testproject.harness.processes import wait_until
from tests.harness.history import CALL_HEADER, UNKNOWN, Call

CLIENTS = 16
TOKEN = "0123456789abcdef0123456789abcdef01234567"
HEADERS = {"Authorization": f"Token {TOKEN}", "Content-Type": "application/json"}
LEASE = 2.0  # seconds
#: A client gives up on an answer before a frozen server wakes, and retries.
TIMEOUT = 1.5  # seconds
#: The pause of a client that got no outcome. Otherwise a server that is down would take all requests.
BACKOFF = 0.05  # seconds
#: The share of requests that begin an operation, and of those that retry one without an outcome. The others duplicate
#: one of the recent operations: a quarter of them the latest one, which is mostly still running.
NEW, RETRY, RECENT = 0.1, 0.2, 200
#: The share of duplicates of an operation with an outcome that have another amount.
CHANGED = 0.02
AMOUNT = 100
#: The mean number of requests before a client reconnects, possibly to another worker.
KEPT = 20

CONTROL, DRAWN = "control", "drawn"
#: The path of each kind of operation, and how many of ten operations are of this kind.
KINDS = {
    "transfer": ("/transfers/", 3),
    DRAWN: ("/drawn/", 2),
    "payout": ("/payouts/", 2),
    "order": ("/orders/", 1),
    CONTROL: ("/control/", 2),
}


@dataclass
class Operation:
    kind: str
    label: str
    has_outcome: bool = False


class Load:
    def __init__(self, port, seed):
        self.port, self.seed = port, seed
        #: The numbers of requests and of their results.
        self.seen = Counter()
        #: How long answers took, in seconds.
        self.times = array("f")
        #: The labels of all operations, by their kind.
        self.operations = defaultdict(list)
        self.problems = []
        #: The calls since the last pause, without the control's.
        self.calls = []
        self.control_calls = []
        self._recent = deque(maxlen=RECENT)
        self._open = deque()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._threads = []

    def start(self):
        self._over.clear()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def wait_for(self, requests):
        wait_until(lambda: self.problems or self.seen["requests"] >= requests, "requests", 600)

    def pause(self, limit):
        """Begin no new operation, and retry until the outcome of each one is known. No duplicate may follow, because a
        purge does.
        """
        self._over.set()
        deadline = time.monotonic() + limit
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if left := [operation.label for operation in self._open if not operation.has_outcome]:
            self.problems.append(f"P7: {len(left)} operations were never settled: {left[:3]}")
        self._recent.clear()

    def _run(self, number):
        chance = random.Random(f"{self.seed} {number} {self.seen['requests']}")
        link = HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        try:
            while not self.problems and (operation := self._next(chance)) is not None:
                if not self._ask(link, operation, chance):
                    time.sleep(BACKOFF)
                if chance.random() < 1 / KEPT:
                    link.close()
        except Exception as error:  # noqa: BLE001 - the main thread reports it
            self.problems.append(repr(error))
        link.close()

    def _next(self, chance):
        draw = chance.random()
        with self._lock:
            while self._open and self._open[0].has_outcome:
                self._open.popleft()
            if self._over.is_set() and not self._open:
                return None
            self.seen["requests"] += 1
            if self._open and (self._over.is_set() or draw < RETRY or len(self._open) > RECENT):
                self._open.rotate(-1)
                return self._open[-1]
            if self._recent and draw > RETRY + NEW:
                return self._recent[-1 - int(len(self._recent) * chance.random() ** 4)]
            (kind,) = chance.choices(list(KINDS), [share for _, share in KINDS.values()])
            operation = Operation(kind, f"{kind}-{self.seed}-{len(self.operations[kind])}")
            self.operations[kind].append(operation.label)
            self._open.append(operation)
            self._recent.append(operation)
            return operation

    def _ask(self, link, operation, chance):
        """:returns: whether the answer was the operation's outcome."""
        is_changed = operation.has_outcome and operation.kind != CONTROL and chance.random() < CHANGED
        payload = json.dumps({"label": operation.label, "amount": AMOUNT + is_changed, "recipient": "bob"})
        sent = {"id": uuid4().hex, "key": operation.label, "payload": payload, "start": time.monotonic()}
        headers = {**HEADERS, "Idempotency-Key": operation.label, CALL_HEADER: sent["id"]}
        try:
            link.request("POST", KINDS[operation.kind][0], payload, headers)
            answer = link.getresponse()
            status, body = answer.status, answer.read()
        except (OSError, HTTPException) as error:
            link.close()
            with self._lock:
                self.seen["late" if isinstance(error, TimeoutError) else "broken"] += 1
                self._keep(operation, Call(**sent))
            return False
        end = time.monotonic()
        call = Call.answered(end=end, headers=answer.headers, status=status, body=body, **sent)
        with self._lock:
            self._keep(operation, call)
            self.times.append(end - call.start)
            self.seen[call.answer] += 1
            self.seen["ambiguous"] += b"did not confirm the commit" in body
            self.seen["errors"] += status >= 500 and call.outcome is None
            operation.has_outcome |= call.outcome is not None
            if call.answer == UNKNOWN and status < 500:
                self.problems.append(f"unexpected answer: {operation.label} {status} {body[:300]!r}")
        return call.outcome is not None or is_changed

    def _keep(self, operation, call):
        (self.control_calls if operation.kind == CONTROL else self.calls).append(call)
