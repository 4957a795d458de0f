"""All charges at once: a pool of threads, each of which sees one charge of one side through to its end."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import httpx

from .client import Answer, Client, Endpoint, Surroundings, Tally
from .plan import Charge, Plan, Trouble
from .verdict import History

#: The first of a burst behaves, the others have troubles of their own.
TROUBLES_IN_A_BURST = (Trouble.CALM, Trouble.CALM, Trouble.CALM, Trouble.TIMEOUT, Trouble.CUT)


class Storm:
    """One run of as many charges against each of some endpoints. ``histories`` fills up while it runs."""

    def __init__(self, plan: Plan, courses: Sequence[tuple[Endpoint, Sequence[Charge]]], tally: Tally) -> None:
        self.endpoints = [endpoint for endpoint, _ in courses]
        self.histories = {endpoint.side.name: [History(charge) for charge in charges] for endpoint, charges in courses}
        self._futures: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(plan.concurrency, thread_name_prefix="charge")
        # No kept connections: see ``server``. Bursts add threads of their own.
        wire = httpx.HTTPTransport(limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))
        self._around = Surroundings(plan, tally, wire, threading.Event())

    @contextmanager
    def running(self) -> Iterator[None]:
        """The storm goes on in the background of the block. After it nothing new is sent, but see ``join``."""
        try:
            for histories in zip(*self.histories.values(), strict=True):
                for endpoint, history in zip(self.endpoints, histories, strict=True):
                    self._futures.append(self._pool.submit(self._see_through, history, endpoint))
            yield
        finally:
            self._around.stop.set()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait for what is still under way, which is short once the server has ended."""
        self._pool.shutdown()
        self._around.wire.close()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the storm for at most ``seconds``; True when it is over. Raises what a thread raised."""
        done, waiting = wait(self._futures, timeout=seconds)
        for future in done:
            future.result()
        return not waiting

    def _see_through(self, history: History, endpoint: Endpoint) -> None:
        charge = history.charge

        def client(role: str) -> Client:
            return Client(charge, endpoint, self._around, role)

        if charge.burst > 1:
            self._burst(history, [client(f"burst-{number}") for number in range(charge.burst)])
        else:
            keep(history, history.answers, client("first").pursue(charge.trouble))
        # Only once the outcome is known: before, a changed payload might rightly be the first to arrive.
        if history.answers and charge.late_duplicate:
            keep(history, history.answers, client("late").pursue(settled=True))
        if history.answers and charge.changed_payload:
            keep(history, history.answers_to_changed, client("changed").pursue(settled=True, changed=True))
        self._around.tally.add(endpoint.side.name, "done")

    def _burst(self, history: History, clients: Sequence[Client]) -> None:
        """Let the clients go at the same instant, and wait for all of them."""
        barrier = threading.Barrier(len(clients))
        chance = random.Random(f"{self._around.plan.seed}:{history.charge.number}:burst")
        if history.charge.trouble is Trouble.STALL:
            troubles = [Trouble.STALL] * len(clients)
        else:
            troubles = [Trouble.CALM, *chance.choices(TROUBLES_IN_A_BURST, k=len(clients) - 1)]

        def pursue(client: Client, trouble: Trouble) -> Answer | None:
            barrier.wait()
            return client.pursue(trouble)

        with ThreadPoolExecutor(len(clients)) as pool:
            for answer in pool.map(pursue, clients, troubles):
                keep(history, history.answers, answer)


def keep(history: History, answers: list[Answer], answer: Answer | None) -> None:
    """Remember what a client was told in the end, or that it never learned it."""
    if answer is None:
        history.gave_up += 1
    else:
        answers.append(answer)
