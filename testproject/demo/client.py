"""Badly behaved clients: each sends its charge, loses the answer in some way, and retries until it knows the outcome.

Each retries with one key and one payload, makes the trouble itself, and counts every request. Its final answer is kept
for the verdict.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from .charges import Charge, Trouble

#: Longer than any honest answer takes on a loaded machine, and shorter than a client's patience.
HONEST_TIMEOUT = 30.0
#: A client that is to be cut off stops waiting after this many seconds, while the server works for longer (in ms).
SHORT_TIMEOUT = (0.03, 0.10)
LONG_WORK = (200, 400)
SHORT_WORK = (0, 25)

#: A client comes back soon, after a Retry-After if there is one, and is ended by its patience: on a loaded machine it
#: may meet many killed workers in a row. Besides a conflict it retries a 500, which may be a killed worker's last word.
STATUSES = frozenset({408, 425, 429, *range(500, 600)})
PATIENCE = 120.0  # seconds
LONGEST_WAIT = 0.15
KILLINGS = frozenset({Trouble.KILL_AT_WORK, Trouble.KILL_AT_REPLY})
#: What an answer is counted as, by its problem's code.
CODES = {"idempotency_in_progress": "conflict", "idempotency_key_reused": "key_reused"}
#: Clients of a charge that is sent several times at the same instant.
BURST = (Trouble.CALM, Trouble.CALM, Trouble.CUT, Trouble.CUT)


@dataclass
class History:
    """All that the clients of one charge were told in the end, at one endpoint."""

    charge: Charge
    answers: list[httpx.Response] = field(default_factory=list)  # to the charge's own payload
    answers_to_changed: list[httpx.Response] = field(default_factory=list)  # to another payload under its key
    gave_up: int = 0  # clients that never got a final answer

    def keep(self, answer: httpx.Response | None, *, changed: bool = False) -> None:
        if answer is None:
            self.gave_up += 1
        else:
            (self.answers_to_changed if changed else self.answers).append(answer)


@dataclass
class Endpoint:
    """Where charges go, and what was seen there."""

    name: str
    url: str
    tokens: dict[str, str]
    #: Set when the storm is over.
    stop: threading.Event
    http: httpx.Client
    #: One for each charge.
    histories: list[History]
    seen: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def saw(self, figure: str) -> None:
        with self._lock:
            self.seen[figure] += 1


class Client:
    """A client of one charge, which makes the trouble of its own requests."""

    def __init__(self, charge: Charge, endpoint: Endpoint, trouble: Trouble = Trouble.CALM) -> None:
        self.charge = charge
        self.endpoint = endpoint
        self.trouble = trouble  # of the next request

    def pursue(self, *, changed: bool = False) -> httpx.Response | None:
        """Send the charge, or its key with another amount, and retry until an answer is final. None if none was."""
        payload, stop = self.charge.payload(changed=changed), self.endpoint.stop
        gives_up_at = time.monotonic() + PATIENCE
        while not stop.is_set() and time.monotonic() < gives_up_at:
            try:
                response = self._send(payload)
            except httpx.TransportError as error:
                self.endpoint.saw("cut" if isinstance(error, httpx.TimeoutException) else "broken")
                required = 0.0
            else:
                if not is_open(response):
                    return response
                required = float(response.headers.get("Retry-After", 0))
            stop.wait(required + random.uniform(0, LONGEST_WAIT))
        return None

    def _send(self, payload: bytes) -> httpx.Response:
        trouble, timeout = self.trouble, HONEST_TIMEOUT
        if trouble in KILLINGS:  # on each request: the server kills itself for a charge only once
            fault = f"{trouble}={self.charge.label}"
        else:
            work = LONG_WORK if trouble is Trouble.CUT else SHORT_WORK
            fault = f"pause={random.randint(*work)}"
            timeout = random.uniform(*SHORT_TIMEOUT) if trouble is Trouble.CUT else HONEST_TIMEOUT
            self.trouble = Trouble.CALM
        headers = {
            "Authorization": f"Token {self.endpoint.tokens[self.charge.account]}",
            "Content-Type": "application/json",
            "Idempotency-Key": self.charge.label,
            "Connection": "close",
            "Demo-Fault": fault,
        }
        self.endpoint.saw("requests")
        response = self.endpoint.http.post(self.endpoint.url, content=payload, headers=headers, timeout=timeout)
        if response.headers.get("Idempotency-Replayed") == "true":
            self.endpoint.saw("replay")
        if seen := CODES.get(code_of(response)) or ("error" if response.status_code >= 500 else ""):
            self.endpoint.saw(seen)
        return response


def is_open(response: httpx.Response) -> bool:
    """Whether a retry may get another answer."""
    is_in_progress = response.status_code == 409 and "Retry-After" in response.headers
    return is_in_progress or response.status_code in STATUSES


def code_of(response: httpx.Response) -> str:
    """The problem's code, if the response is one."""
    is_problem = response.headers.get("Content-Type") == "application/problem+json"
    return str(response.json()["code"]) if is_problem else ""


@contextmanager
def storm(endpoints: Sequence[Endpoint], stop: threading.Event, at_once: int) -> Iterator[list[Future[None]]]:
    """Send each endpoint's charges in the background of the block. After it nothing new is sent."""
    pool = ThreadPoolExecutor(at_once, thread_name_prefix="charge")
    try:
        turns = zip(*(endpoint.histories for endpoint in endpoints), strict=True)
        pairs = [pair for turn in turns for pair in zip(turn, endpoints, strict=True)]
        yield [pool.submit(see_through, history, endpoint) for history, endpoint in pairs]
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def see_through(history: History, endpoint: Endpoint) -> None:
    charge = history.charge
    troubles = BURST if charge.trouble is Trouble.BURST else (charge.trouble,)
    barrier = threading.Barrier(len(troubles))

    def pursue(trouble: Trouble) -> None:
        barrier.wait()
        history.keep(Client(charge, endpoint, trouble).pursue())

    with ThreadPoolExecutor(len(troubles)) as pool:
        list(pool.map(pursue, troubles))
    # Only once the outcome is known: before, a changed payload might rightly be the first to arrive.
    if history.answers and charge.is_sent_late:
        history.keep(Client(charge, endpoint).pursue())
    if history.answers and charge.is_sent_changed:
        history.keep(Client(charge, endpoint).pursue(changed=True), changed=True)
