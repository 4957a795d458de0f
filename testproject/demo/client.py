"""Badly behaved clients: each sends a charge, loses the response in some way, and retries until it knows the outcome.

The package's httpx transport retries with one key and one payload, over a network that causes the trouble and counts
every request. The final responses are kept for the verdict.
"""

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import httpx

from idempotency.contrib.httpx import IdempotentTransport, RetryPolicy, UnresolvedRequestError

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
POLICY = RetryPolicy(attempts=100_000, total=120.0, first_wait=0.15, longest_wait=0.15, statuses=STATUSES)
KILLINGS = frozenset({Trouble.KILL_AT_WORK, Trouble.KILL_AT_REPLY})
#: The figure that counts a response, by its problem's code.
CODES = {"idempotency_in_progress": "conflict", "idempotency_key_reused": "key_reused"}
#: The clients of a charge that is sent several times at the same instant.
BURST = (Trouble.CALM, Trouble.CALM, Trouble.CUT, Trouble.CUT)


class StoppedError(Exception):
    """The storm ended before the client knew its outcome."""


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
    wire: httpx.BaseTransport
    #: One for each charge.
    histories: list[History]
    figures: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, figure: str) -> None:
        with self._lock:
            self.figures[figure] += 1


class Client(httpx.BaseTransport):
    """A client of one charge, and the network between its retries and the server, which causes the trouble."""

    def __init__(self, charge: Charge, endpoint: Endpoint, trouble: Trouble = Trouble.CALM) -> None:
        self.charge = charge
        self.endpoint = endpoint
        self.trouble = trouble  # for the next request

    def pursue(self, *, changed: bool = False) -> httpx.Response | None:
        """Send the charge, or its key with another amount, and return the final response, or None without one."""
        headers = {
            "Authorization": f"Token {self.endpoint.tokens[self.charge.account]}",
            "Content-Type": "application/json",
            "Idempotency-Key": self.charge.label,
            "Connection": "close",
        }
        transport = IdempotentTransport(self, policy=POLICY, sleep=self._sleep)
        with httpx.Client(transport=transport, trust_env=False) as http, suppress(UnresolvedRequestError, StoppedError):
            return http.post(self.endpoint.url, content=self.charge.payload(changed=changed), headers=headers)
        return None

    def _sleep(self, seconds: float) -> None:
        if self.endpoint.stop.wait(seconds):
            raise StoppedError

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request. Raises httpx's errors if the client gets no response."""
        if self.endpoint.stop.is_set():
            raise StoppedError
        trouble, timeout = self.trouble, HONEST_TIMEOUT
        if trouble in KILLINGS:  # sent with each request, but the server kills only one worker per charge
            request.headers["Demo-Fault"] = f"{trouble}={self.charge.label}"
        else:
            work = LONG_WORK if trouble is Trouble.CUT else SHORT_WORK
            request.headers["Demo-Fault"] = f"pause={random.randint(*work)}"
            timeout = random.uniform(*SHORT_TIMEOUT) if trouble is Trouble.CUT else HONEST_TIMEOUT
            self.trouble = Trouble.CALM
        request.extensions["timeout"] = httpx.Timeout(timeout).as_dict()
        self.endpoint.count("requests")
        try:
            response = self.endpoint.wire.handle_request(request)
            response.read()
        except httpx.TransportError as error:
            self.endpoint.count("cut" if isinstance(error, httpx.TimeoutException) else "broken")
            raise
        if response.headers.get("Idempotency-Replayed") == "true":
            self.endpoint.count("replay")
        if figure := CODES.get(code_of(response)) or ("error" if response.status_code >= 500 else ""):
            self.endpoint.count(figure)
        return response


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
