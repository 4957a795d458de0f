"""One badly behaved client: it sends its charge, loses the answer in some way, and retries until it knows the outcome.

Every retry carries the same key and the same payload, as a retry must. What it is told is kept for the verdict.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import Any

import httpx

from .plan import Charge, Plan, Trouble
from .tally import Seen, Tally

#: Longer than any honest answer takes on a loaded machine, and shorter than a client's patience.
HONEST_TIMEOUT = 15.0
#: A client that is to time out stops waiting after this many seconds, while the server works for longer (in ms).
SHORT_TIMEOUT = (0.03, 0.10)
LONG_WORK = (200, 400)
SHORT_WORK = (0, 25)
#: The twin of a stalled request is to take over: it doesn't queue for long behind what else is stalled.
TIMEOUT_OF_A_TWIN = 1.0
#: A cut comes this many seconds after the request was sent: before the server has read it, at work, or afterwards.
CUT_AFTER = (0.0, 0.06)
#: Without a Retry-After a client comes back after this many seconds.
BACK_OFF = (0.02, 0.15)

KILLINGS = frozenset({Trouble.KILL_AT_WORK, Trouble.KILL_AT_REPLY})
#: Asked for until they come about.
SERVERS_TROUBLES = KILLINGS | {Trouble.STALL}
RETRIABLE = frozenset({408, 425, 429})
#: Closing a socket with this option sends a reset instead of an orderly end.
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Answer:
    """What a client was told."""

    status: int
    content_type: str
    location: str | None
    body: bytes
    code: str = ""  # the problem's code, if it is one
    replayed: bool = False
    retry_after: float | None = None  # seconds

    @property
    def is_final(self) -> bool:
        """False where the answer asks for a retry. An unknown outcome doesn't: nobody may retry it blindly."""
        if self.status == 409:
            return self.code != "idempotency_in_progress"
        return self.status < 500 and self.status not in RETRIABLE


@dataclass(frozen=True)
class Endpoint:
    """Where a side's charges go, and who sends them."""

    side: str
    port: int
    path: str
    tokens: dict[str, str]


class Client:
    """A client of one charge. Several of them for one charge are its simultaneous duplicates."""

    def __init__(
        self,
        charge: Charge,
        endpoint: Endpoint,
        http: httpx.Client,
        plan: Plan,
        tally: Tally,
        stop: threading.Event,
        *,
        role: str,
    ) -> None:
        self.charge = charge
        self.endpoint = endpoint
        self.http = http
        self.plan = plan
        self.tally = tally
        self.stop = stop
        # The side is left out of it: both endpoints meet the same client.
        self.chance = random.Random(f"{plan.seed}:{charge.number}:{role}")

    def pursue(self, trouble: Trouble) -> Answer | None:
        """Send the charge into ``trouble``, then retry until an answer is final. None: it never was."""
        return self._insist(self.charge.payload(), trouble, respect_conflicts=True)

    def send_again(self) -> Answer | None:
        """Send the charge once more though its outcome is known. Anything but that outcome is a wrong answer."""
        return self._insist(self.charge.payload(), Trouble.CALM, respect_conflicts=False)

    def send_changed(self) -> Answer | None:
        """Use the key of the charge, whose outcome is known, with another amount."""
        return self._insist(self.charge.payload(changed=True), Trouble.CALM, respect_conflicts=False)

    def _insist(self, payload: bytes, trouble: Trouble, *, respect_conflicts: bool) -> Answer | None:
        deadline = time.monotonic() + self.plan.patience
        while not self.stop.is_set() and time.monotonic() < deadline:
            answer = self._attempt(payload, trouble)
            if not (trouble in SERVERS_TROUBLES and answer is None and not self._was_troubled()):
                trouble = Trouble.CALM  # one trouble a client; what the killer adds comes on top
            if answer is not None and (answer.is_final or (answer.status < 500 and not respect_conflicts)):
                return answer
            self.stop.wait(self._pause_after(answer))
        return None

    def _pause_after(self, answer: Answer | None) -> float:
        """Seconds until the next attempt."""
        pause = self.chance.uniform(*BACK_OFF)
        if answer is None or answer.retry_after is None or self.charge.trouble is Trouble.STALL:
            return pause  # the twin of a stalled request asks again and again, so that it takes over as soon as it may
        # Within bounds: no claim lives for longer than its lease, whatever the answer says.
        return min(answer.retry_after, self.plan.lease + 1.0)

    def _attempt(self, payload: bytes, trouble: Trouble) -> Answer | None:
        """One request. None if the client never saw an answer."""
        self._saw(Seen.ATTEMPT)
        started = time.monotonic()
        headers = self._headers(trouble)
        if trouble is Trouble.CUT:
            self._send_and_cut(payload, headers)
            return None
        timeout = HONEST_TIMEOUT
        if trouble is Trouble.TIMEOUT:
            timeout = self.chance.uniform(*SHORT_TIMEOUT)
        elif trouble is Trouble.CALM and self.charge.trouble is Trouble.STALL:
            timeout = TIMEOUT_OF_A_TWIN
        try:
            response = self.http.post(self._url(), content=payload, headers=headers, timeout=timeout)
        except httpx.TimeoutException:
            self._saw(Seen.TIMEOUT)
            return None
        except httpx.TransportError:
            self._saw(Seen.BROKEN)
            if trouble in KILLINGS and self._was_troubled():
                self._saw(Seen.KILLED_AT_WORK)
            return None
        answer = answer_of(response)
        self._count(answer)
        late = trouble is Trouble.STALL and time.monotonic() - started > self.plan.lease
        if late and (answer.replayed or not answer.is_final):
            self._saw(Seen.OUTLIVED)  # told what the winner did, or that it is at it
        return answer

    def _headers(self, trouble: Trouble) -> dict[str, str]:
        name = f"{self.endpoint.side}/{self.charge.number}"
        fault = {
            Trouble.STALL: f"stall={name}={self.plan.lease}",
            Trouble.TIMEOUT: f"pause={self.chance.randint(*LONG_WORK)}",
            Trouble.KILL_AT_WORK: f"kill_at_work={name}",
            Trouble.KILL_AT_REPLY: f"kill_at_reply={name}",
        }.get(trouble, f"pause={self.chance.randint(*SHORT_WORK)}")
        return {
            "Host": f"127.0.0.1:{self.endpoint.port}",
            "Authorization": f"Token {self.endpoint.tokens[self.charge.account]}",
            "Content-Type": "application/json",
            "Idempotency-Key": self.charge.key,
            "Connection": "close",
            "Demo-Fault": fault,
        }

    def _url(self) -> str:
        return f"http://127.0.0.1:{self.endpoint.port}{self.endpoint.path}"

    def _send_and_cut(self, payload: bytes, headers: dict[str, str]) -> None:
        lines = [f"POST {self.endpoint.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        head = "\r\n".join([*lines, f"Content-Length: {len(payload)}", "", ""]).encode("ascii")
        try:
            with socket.create_connection(("127.0.0.1", self.endpoint.port), timeout=HONEST_TIMEOUT) as connection:
                connection.sendall(head + payload)
                self.stop.wait(self.chance.uniform(*CUT_AFTER))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        except OSError:
            self._saw(Seen.BROKEN)
        else:
            self._saw(Seen.CUT)

    def _count(self, answer: Answer) -> None:
        if answer.replayed:
            self._saw(Seen.REPLAY)
        if answer.code == "idempotency_in_progress":
            self._saw(Seen.CONFLICT)
        elif answer.code == "idempotency_key_reused":
            self._saw(Seen.MISMATCH)
        elif answer.status == 503:
            self._saw(Seen.UNAVAILABLE)
        elif answer.status == 502:
            self._saw(Seen.PROVIDER_FAILED)
        elif answer.status >= 500:
            self._saw(Seen.ERROR)

    def _was_troubled(self) -> bool:
        """Whether the trouble came about that this charge asked for. A neighbour's may have ended its worker before."""
        return self.tally.was_troubled(self.endpoint.side, self.charge.number)

    def _saw(self, seen: Seen) -> None:
        self.tally.add(self.endpoint.side, seen)


def answer_of(response: httpx.Response) -> Answer:
    content_type = response.headers.get("Content-Type", "")
    problem: Any = None
    if content_type.startswith("application/problem+json"):
        problem = json.loads(response.content)
    retry_after = response.headers.get("Retry-After", "")
    return Answer(
        status=response.status_code,
        content_type=content_type,
        location=response.headers.get("Location"),
        body=response.content,
        code=str(problem.get("code", "")) if isinstance(problem, dict) else "",
        replayed=response.headers.get("Idempotency-Replayed") == "true",
        retry_after=float(retry_after) if retry_after.isdigit() else None,
    )
