"""One badly behaved client: it sends its charge, loses the answer in some way, and retries until it knows the outcome.

The package's own transport does the retrying, with one key and one payload, over a network that makes the trouble and
counts every request. What the client is told in the end is kept for the verdict.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import httpx

from idempotency.contrib.httpx import IdempotentTransport, RetryPolicy, UnresolvedRequestError
from testproject.harness.strikes import Marks

from .acts import Side
from .plan import Charge, Plan, Trouble

#: Longer than any honest answer takes on a loaded machine, and shorter than a client's patience.
HONEST_TIMEOUT = 30.0
#: A client that is to time out stops waiting after this many seconds, while the server works for longer (in ms).
SHORT_TIMEOUT = (0.03, 0.10)
LONG_WORK = (200, 400)
SHORT_WORK = (0, 25)
#: The twin of a stalled request is to take over: it doesn't queue for long behind what else is stalled.
TIMEOUT_OF_A_TWIN = 1.0
#: A cut comes this many seconds after the request was sent: before the server has read it, at work, or afterwards.
CUT_AFTER = (0.0, 0.06)
#: A client comes back within this many seconds, after a Retry-After if there is one.
BACK_OFF = 0.15
#: It is its patience that ends it, not a number of attempts.
MANY = 100_000

KILLINGS = frozenset({Trouble.KILL_AT_WORK, Trouble.KILL_AT_REPLY})
#: Asked for until they come about.
SERVERS_TROUBLES = KILLINGS | {Trouble.STALL}
#: Answers that ask for a retry, besides a conflict with a request in progress. 500 too: a killed worker's last word.
PASSING = frozenset({408, 425, 429, *range(500, 600)})
IN_PROGRESS = "idempotency_in_progress"
#: What an answer is counted as, by its problem's code or by its status.
CODES = {IN_PROGRESS: "conflict", "idempotency_key_reused": "key_reused"}
STATUSES = {503: "unavailable", 502: "provider_failed"}
#: Closing a socket with this option sends a reset instead of an orderly end.
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Tally:
    """How often each thing was seen on each side, by the names of the acts' figures. Safe to use from every thread."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self._lock = threading.Lock()
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(self, side: str, figure: str) -> None:
        with self._lock:
            self._counts[side][figure] += 1

    def of(self, side: str) -> Counter[str]:
        with self._lock:
            return self._counts[side].copy()


@dataclass(frozen=True)
class Answer:
    """What a client was told."""

    status: int
    content_type: str
    location: str | None
    body: bytes
    code: str = ""  # the problem's code, if it is one
    replayed: bool = False

    @property
    def outcome(self) -> tuple[object, ...]:
        """What must be the same for every client of a charge."""
        return self.status, self.content_type, self.location, self.body


@dataclass(frozen=True)
class Endpoint:
    """Where a side's charges go, and who sends them."""

    side: Side
    port: int
    tokens: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.side.path}"


class StoppedError(Exception):
    """The storm is over before the client knows its outcome."""


class CutError(httpx.ReadError):
    """The client has reset the connection itself."""


@dataclass(frozen=True)
class Surroundings:
    """What all clients of a storm share."""

    plan: Plan
    tally: Tally
    wire: httpx.BaseTransport
    #: Set when the storm is over.
    stop: threading.Event


class Client(httpx.BaseTransport):
    """A client of one charge. Several of them for one charge are its simultaneous duplicates.

    It is the network between its retries and the server, too: gets requests into trouble, and counts what comes.
    """

    def __init__(self, charge: Charge, endpoint: Endpoint, around: Surroundings, role: str) -> None:
        self.charge = charge
        self.endpoint = endpoint
        self.around = around
        self.trouble = Trouble.CALM  # of the next request
        self.conflict: Answer | None = None  # the first answer that said that the charge is in progress
        self._name = f"{endpoint.side.name}.{charge.number}"
        # The side is left out of it: all endpoints meet the same client.
        self.chance = random.Random(f"{around.plan.seed}:{charge.number}:{role}")

    def pursue(self, trouble: Trouble = Trouble.CALM, *, settled: bool = False, changed: bool = False) -> Answer | None:
        """Send the charge into ``trouble``, then retry until an answer is final.

        :param settled: its outcome is known already, so anything but that is a wrong answer.
        :param changed: use the charge's key with another amount.
        :returns: None if no answer was ever final.
        """
        if self.around.stop.is_set():
            return None
        self.trouble = trouble
        policy = RetryPolicy(
            attempts=MANY, total=self.around.plan.patience, first_wait=BACK_OFF, longest_wait=BACK_OFF, statuses=PASSING
        )
        transport = IdempotentTransport(self, policy=policy, sleep=self._sleep)
        headers = {
            "Authorization": f"Token {self.endpoint.tokens[self.charge.account]}",
            "Content-Type": "application/json",
            "Idempotency-Key": self.charge.key,
            "Connection": "close",
        }
        answer: Answer | None = None
        with httpx.Client(transport=transport, trust_env=False) as http, suppress(UnresolvedRequestError, StoppedError):
            payload = self.charge.payload(changed=changed)
            answer = answer_of(http.post(self.endpoint.url, content=payload, headers=headers))
        # It was retried, as it should be. But nothing is in progress any more once there is an outcome.
        return self.conflict if settled and self.conflict else answer

    def _sleep(self, seconds: float) -> None:
        if self.around.stop.wait(seconds):
            raise StoppedError

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """One request. Raises what httpx does where the client never sees an answer."""
        trouble, started = self.trouble, time.monotonic()
        request.headers["Demo-Fault"] = self._fault(trouble)
        request.extensions["timeout"] = httpx.Timeout(self._timeout(trouble)).as_dict()
        self._saw("attempt")
        try:
            if trouble is Trouble.CUT:
                self._send_and_cut(request)
            response = self.around.wire.handle_request(request)
            response.read()
        except httpx.TransportError as error:
            self._count_failure(error, trouble)
            if trouble not in SERVERS_TROUBLES or self._was_troubled():
                self.trouble = Trouble.CALM
            raise
        answer = answer_of(response)
        self._count(answer)
        # One trouble a client; what is killed at random comes on top. A stall is still due when the claim belongs to a
        # worker that a neighbour's trouble killed before it could stand still.
        if trouble is not Trouble.STALL or answer.code != IN_PROGRESS or self._was_troubled():
            self.trouble = Trouble.CALM
        late = trouble is Trouble.STALL and time.monotonic() - started > self.around.plan.lease
        if late and (answer.replayed or answer.code == IN_PROGRESS):
            self._saw("outlived")  # told what the winner did, or that it is at it
        if self.charge.trouble is Trouble.STALL:
            # The twin of a stalled request asks again and again, so that it takes over as soon as it may.
            response.headers.pop("Retry-After", None)
        return response

    def _fault(self, trouble: Trouble) -> str:
        """What the server is asked to do, as its side of the trouble."""
        if trouble in SERVERS_TROUBLES:
            return f"{trouble.value}={self._name}"
        return f"pause={self.chance.randint(*LONG_WORK if trouble is Trouble.TIMEOUT else SHORT_WORK)}"

    def _timeout(self, trouble: Trouble) -> float:
        """Seconds that the client waits for an answer."""
        if trouble is Trouble.TIMEOUT:
            return self.chance.uniform(*SHORT_TIMEOUT)
        if trouble is Trouble.CALM and self.charge.trouble is Trouble.STALL:
            return TIMEOUT_OF_A_TWIN
        return HONEST_TIMEOUT

    def _send_and_cut(self, request: httpx.Request) -> NoReturn:
        lines = [f"POST {request.url.path} HTTP/1.1".encode("ascii")]
        lines += [name + b": " + value for name, value in request.headers.raw]
        try:
            address = ("127.0.0.1", self.endpoint.port)
            with socket.create_connection(address, timeout=HONEST_TIMEOUT) as connection:
                connection.sendall(b"\r\n".join([*lines, b"", b""]) + request.content)
                self.around.stop.wait(self.chance.uniform(*CUT_AFTER))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        raise CutError("cut")

    def _count_failure(self, error: httpx.TransportError, trouble: Trouble) -> None:
        if isinstance(error, CutError):
            self._saw("cut")
        elif isinstance(error, httpx.TimeoutException):
            self._saw("timeout")
        else:
            self._saw("broken")
            if trouble in KILLINGS and self._was_troubled():
                self._saw("killed_at_work")

    def _count(self, answer: Answer) -> None:
        if answer.replayed:
            self._saw("replay")
        if answer.code == IN_PROGRESS:
            self.conflict = self.conflict or answer
        if seen := CODES.get(answer.code) or STATUSES.get(answer.status):
            self._saw(seen)
        elif answer.status >= 500:
            self._saw("error")

    def _was_troubled(self) -> bool:
        """Whether the trouble came about that this charge asked for. A neighbour's may have ended its worker before."""
        return self.around.tally.marks.exists(f"met.{self._name}")

    def _saw(self, seen: str) -> None:
        self.around.tally.add(self.endpoint.side.name, seen)


def answer_of(response: httpx.Response) -> Answer:
    content_type = response.headers.get("Content-Type", "")
    problem: Any = json.loads(response.content) if content_type.startswith("application/problem+json") else None
    return Answer(
        status=response.status_code,
        content_type=content_type,
        location=response.headers.get("Location"),
        body=response.content,
        code=str(problem.get("code", "")) if isinstance(problem, dict) else "",
        replayed=response.headers.get("Idempotency-Replayed") == "true",
    )
