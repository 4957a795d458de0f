"""One badly behaved client: it sends its charge, loses the answer in some way, and retries until it knows the outcome.

The package's own transport does the retrying, with one key and one payload, over a network that makes the trouble and
counts every request. What the client is told in the end is kept for the verdict.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from idempotency.contrib.httpx import IdempotentTransport, RetryPolicy, UnresolvedRequestError

from .plan import Charge, Plan, Trouble

#: Longer than any honest answer takes on a loaded machine, and shorter than a client's patience.
HONEST_TIMEOUT = 30.0
#: A client that is to be cut off stops waiting after this many seconds, while the server works for longer (in ms).
SHORT_TIMEOUT = (0.03, 0.10)
LONG_WORK = (200, 400)
SHORT_WORK = (0, 25)
#: A client comes back within this many seconds, after a Retry-After if there is one.
BACK_OFF = 0.15
#: A client is ended by its patience, not by a number of attempts.
MANY = 100_000

KILLINGS = frozenset({Trouble.KILL_AT_WORK, Trouble.KILL_AT_REPLY})
#: Answers that ask for a retry, besides a conflict with a request in progress. 500 too: a killed worker's last word.
PASSING = frozenset({408, 425, 429, *range(500, 600)})
#: What an answer is counted as, by its problem's code.
CODES = {"idempotency_in_progress": "conflict", "idempotency_key_reused": "key_reused"}


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


class StoppedError(Exception):
    """The storm is over before the client knows its outcome."""


@dataclass
class Endpoint:
    """Where charges go, and what was seen there."""

    name: str
    url: str
    tokens: dict[str, str]
    plan: Plan
    #: Set when the storm is over.
    stop: threading.Event
    wire: httpx.BaseTransport
    seen: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def saw(self, figure: str) -> None:
        with self._lock:
            self.seen[figure] += 1


class Client(httpx.BaseTransport):
    """A client of one charge. Several of them for one charge are its simultaneous duplicates.

    It is also the network between its retries and the server: it gets requests into trouble, and counts what comes.
    """

    def __init__(self, charge: Charge, endpoint: Endpoint, role: str) -> None:
        self.charge = charge
        self.endpoint = endpoint
        self.trouble = Trouble.CALM  # of the next request
        # Without the endpoint, because both meet the same client.
        self.chance = random.Random(f"{endpoint.plan.seed}:{charge.number}:{role}")

    def pursue(self, trouble: Trouble = Trouble.CALM, *, changed: bool = False) -> Answer | None:
        """Send the charge into ``trouble``, then retry until an answer is final.

        :param changed: use the charge's key with another amount.
        :returns: None if no answer was ever final.
        """
        self.trouble = trouble
        policy = RetryPolicy(
            attempts=MANY,
            total=self.endpoint.plan.patience,
            first_wait=BACK_OFF,
            longest_wait=BACK_OFF,
            statuses=PASSING,
        )
        transport = IdempotentTransport(self, policy=policy, sleep=self._sleep)
        headers = {
            "Authorization": f"Token {self.endpoint.tokens[self.charge.account]}",
            "Content-Type": "application/json",
            "Idempotency-Key": self.charge.key,
            "Connection": "close",
        }
        with httpx.Client(transport=transport, trust_env=False) as http, suppress(UnresolvedRequestError, StoppedError):
            payload = self.charge.payload(changed=changed)
            return answer_of(http.post(self.endpoint.url, content=payload, headers=headers))
        return None

    def _sleep(self, seconds: float) -> None:
        if self.endpoint.stop.wait(seconds):
            raise StoppedError

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """One request. Raises what httpx does where the client never sees an answer."""
        if self.endpoint.stop.is_set():
            raise StoppedError
        trouble, timeout = self.trouble, HONEST_TIMEOUT
        if trouble in KILLINGS:  # on each request: the server kills itself for a charge only once
            request.headers["Demo-Fault"] = f"{trouble.value}={self.endpoint.name}.{self.charge.number}"
        else:
            work = LONG_WORK if trouble is Trouble.CUT else SHORT_WORK
            request.headers["Demo-Fault"] = f"pause={self.chance.randint(*work)}"
            timeout = self.chance.uniform(*SHORT_TIMEOUT) if trouble is Trouble.CUT else HONEST_TIMEOUT
            self.trouble = Trouble.CALM
        request.extensions["timeout"] = httpx.Timeout(timeout).as_dict()
        self.endpoint.saw("requests")
        try:
            response = self.endpoint.wire.handle_request(request)
            response.read()
        except httpx.TransportError as error:
            self.endpoint.saw("cut" if isinstance(error, httpx.TimeoutException) else "broken")
            raise
        answer = answer_of(response)
        if answer.replayed:
            self.endpoint.saw("replay")
        if seen := CODES.get(answer.code) or ("error" if answer.status >= 500 else ""):
            self.endpoint.saw(seen)
        return response


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
