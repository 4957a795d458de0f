"""Badly behaved clients: each sends a charge, loses the response in some way, and retries until it knows the outcome.

Each retries with one key and one payload, causes the trouble itself, and counts every request. Its final response is
kept for the verdict.
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

#: Longer than any undisturbed response takes on a loaded machine, and shorter than the client's total timeout.
HONEST_TIMEOUT = 30.0
#: A client that drops its connection waits for this many seconds, while the server works for longer (in ms).
SHORT_TIMEOUT = (0.03, 0.10)
LONG_WORK = (200, 400)
SHORT_WORK = (0, 25)

#: A client retries soon, or after Retry-After. Only the total time limits its attempts, because on a loaded machine it
#: may run into many killed workers in a row. It also retries a 500, which a dying worker may have sent.
STATUSES = frozenset({408, 425, 429, *range(500, 600)})
PATIENCE = 120.0  # seconds
LONGEST_WAIT = 0.15
KILLINGS = frozenset({Trouble.KILL_AT_WORK, Trouble.KILL_AT_REPLY})
#: The figure that counts a response, by its problem's code.
CODES = {"idempotency_in_progress": "conflict", "idempotency_key_reused": "key_reused"}
#: The clients of a charge that is sent several times at the same instant.
BURST = (Trouble.CALM, Trouble.CALM, Trouble.CUT, Trouble.CUT)


@dataclass
class History:
    """The final responses to one charge's clients from one endpoint."""

    charge: Charge
    answers: list[httpx.Response] = field(default_factory=list)  # to the charge's own payload
    answers_to_changed: list[httpx.Response] = field(default_factory=list)  # to another payload under its key
    gave_up: int = 0  # clients that never got a final response

    def keep(self, answer: httpx.Response | None, *, changed: bool = False) -> None:
        if answer is None:
            self.gave_up += 1
        else:
            (self.answers_to_changed if changed else self.answers).append(answer)


@dataclass
class Endpoint:
    """An endpoint, its clients' histories and its figures."""

    name: str
    url: str
    tokens: dict[str, str]
    #: Set when the storm is over.
    stop: threading.Event
    http: httpx.Client
    #: One for each charge.
    histories: list[History]
    figures: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, figure: str) -> None:
        with self._lock:
            self.figures[figure] += 1


class Client:
    """A client of one charge, which also disturbs its requests."""

    def __init__(self, charge: Charge, endpoint: Endpoint, trouble: Trouble = Trouble.CALM) -> None:
        self.charge = charge
        self.endpoint = endpoint
        self.trouble = trouble  # for the next request

    def pursue(self, *, changed: bool = False) -> httpx.Response | None:
        """Send the charge, or its key with another amount, and return the final response, or None without one."""
        payload, stop = self.charge.payload(changed=changed), self.endpoint.stop
        gives_up_at = time.monotonic() + PATIENCE
        while not stop.is_set() and time.monotonic() < gives_up_at:
            try:
                response = self._send(payload)
            except httpx.TransportError as error:
                self.endpoint.count("cut" if isinstance(error, httpx.TimeoutException) else "broken")
                required = 0.0
            else:
                if not is_open(response):
                    return response
                required = float(response.headers.get("Retry-After", 0))
            stop.wait(required + random.uniform(0, LONGEST_WAIT))
        return None

    def _send(self, payload: bytes) -> httpx.Response:
        trouble, timeout = self.trouble, HONEST_TIMEOUT
        if trouble in KILLINGS:  # sent with each request, but the server kills only one worker per charge
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
        self.endpoint.count("requests")
        response = self.endpoint.http.post(self.endpoint.url, content=payload, headers=headers, timeout=timeout)
        if response.headers.get("Idempotency-Replayed") == "true":
            self.endpoint.count("replay")
        if figure := CODES.get(code_of(response)) or ("error" if response.status_code >= 500 else ""):
            self.endpoint.count(figure)
        return response


def is_open(response: httpx.Response) -> bool:
    """Whether a retry may get another answer."""
    is_in_progress = response.status_code == 409 and "Retry-After" in response.headers
    return is_in_progress or response.status_code in STATUSES


def code_of(response: httpx.Response) -> str:
    """The problem's code, or "" for another response."""
    is_problem = response.headers.get("Content-Type") == "application/problem+json"
    return str(response.json()["code"]) if is_problem else ""


@contextmanager
def storm(endpoints: Sequence[Endpoint], stop: threading.Event, at_once: int) -> Iterator[list[Future[None]]]:
    """Send each endpoint's charges in the background during the block. Nothing new is sent afterwards."""
    pool = ThreadPoolExecutor(at_once, thread_name_prefix="charge")
    try:
        turns = zip(*(endpoint.histories for endpoint in endpoints), strict=True)
        pairs = [pair for turn in turns for pair in zip(turn, endpoints, strict=True)]
        yield [pool.submit(complete, history, endpoint) for history, endpoint in pairs]
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def complete(history: History, endpoint: Endpoint) -> None:
    """Send a charge and its repetitions."""
    charge = history.charge
    troubles = BURST if charge.trouble is Trouble.BURST else (charge.trouble,)
    barrier = threading.Barrier(len(troubles))

    def pursue(trouble: Trouble) -> None:
        barrier.wait()
        history.keep(Client(charge, endpoint, trouble).pursue())

    with ThreadPoolExecutor(len(troubles)) as pool:
        list(pool.map(pursue, troubles))
    # Only after the outcome is known. Before that, the changed payload could legitimately arrive first.
    if history.answers and charge.is_sent_late:
        history.keep(Client(charge, endpoint).pursue())
    if history.answers and charge.is_sent_changed:
        history.keep(Client(charge, endpoint).pursue(changed=True), changed=True)
