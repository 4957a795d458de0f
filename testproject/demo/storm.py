"""All charges at once: a pool of threads, each of which sees one charge of one endpoint through to its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from .charges import Charge, Trouble
from .client import Client, Endpoint
from .verdict import History

#: Clients of a charge that is sent several times at the same instant.
BURST = (Trouble.CALM, Trouble.CALM, Trouble.CUT, Trouble.CUT)


class Storm:
    """The same charges against each of some endpoints. ``histories`` fills up while it runs."""

    def __init__(self, courses: Mapping[str, tuple[Endpoint, Sequence[Charge]]]) -> None:
        self.histories = {name: [History(charge) for charge in charges] for name, (_, charges) in courses.items()}
        self._endpoints = [endpoint for endpoint, _ in courses.values()]
        self._futures: list[Future[None]] = []

    @contextmanager
    def running(self, stop: threading.Event, at_once: int) -> Iterator[None]:
        """The storm goes on in the background of the block. After it nothing new is sent."""
        pool = ThreadPoolExecutor(at_once, thread_name_prefix="charge")
        try:
            for histories in zip(*self.histories.values(), strict=True):
                for endpoint, history in zip(self._endpoints, histories, strict=True):
                    self._futures.append(pool.submit(see_through, history, endpoint))
            yield
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the storm for at most ``seconds``; True when it is over. Raises what a thread raised."""
        done, waiting = wait(self._futures, timeout=seconds)
        for future in done:
            future.result()
        return not waiting


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
