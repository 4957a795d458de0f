"""All charges at once: a pool of threads, each of which sees one charge of one endpoint through to its end."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from .client import Client, Endpoint
from .plan import Charge, Plan, Trouble
from .verdict import History

#: The first of a burst behaves, the others have troubles of their own.
TROUBLES_IN_A_BURST = (Trouble.CALM, Trouble.CALM, Trouble.CALM, Trouble.CUT, Trouble.CUT)


class Storm:
    """The same charges against each of some endpoints. ``histories`` fills up while it runs."""

    def __init__(self, plan: Plan, courses: Sequence[tuple[Endpoint, Sequence[Charge]]]) -> None:
        self.histories = {endpoint.name: [History(charge) for charge in charges] for endpoint, charges in courses}
        self._endpoints = [endpoint for endpoint, _ in courses]
        self._futures: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(plan.concurrency, thread_name_prefix="charge")

    @contextmanager
    def running(self, stop: threading.Event) -> Iterator[None]:
        """The storm goes on in the background of the block. After it nothing new is sent."""
        try:
            for histories in zip(*self.histories.values(), strict=True):
                for endpoint, history in zip(self._endpoints, histories, strict=True):
                    self._futures.append(self._pool.submit(see_through, history, endpoint))
            yield
        finally:
            stop.set()
            self._pool.shutdown(cancel_futures=True)

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the storm for at most ``seconds``; True when it is over. Raises what a thread raised."""
        done, waiting = wait(self._futures, timeout=seconds)
        for future in done:
            future.result()
        return not waiting


def see_through(history: History, endpoint: Endpoint) -> None:
    charge = history.charge
    clients = [Client(charge, endpoint, f"first-{number}") for number in range(charge.burst)]
    chance = random.Random(f"{endpoint.plan.seed}:{charge.number}")
    troubles = [charge.trouble, *chance.choices(TROUBLES_IN_A_BURST, k=charge.burst - 1)]
    barrier = threading.Barrier(charge.burst)

    def pursue(client: Client, trouble: Trouble) -> None:
        barrier.wait()
        history.keep(client.pursue(trouble))

    with ThreadPoolExecutor(charge.burst) as pool:
        list(pool.map(pursue, clients, troubles))
    # Only once the outcome is known: before, a changed payload might rightly be the first to arrive.
    if history.answers and charge.late_duplicate:
        history.keep(Client(charge, endpoint, "late").pursue())
    if history.answers and charge.changed_payload:
        history.keep(Client(charge, endpoint, "changed").pursue(changed=True), changed=True)
    endpoint.saw("done")
