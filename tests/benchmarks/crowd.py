"""Many duplicates of one request at once, while the first one is still in its handler."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from django.db import connection
from typing_extensions import Self

from tests.concurrency import racing
from tests.concurrency.racing import PATIENCE

T = TypeVar("T")

#: The key in a request's META under which its view finds the gate.
GATE = "benchmarks.gate"


class Gate(racing.Gate):
    """Where the first execution stays in its handler, with its work done, until it is let go on."""

    opened_at = 0.0  # of time.perf_counter()

    def open(self) -> None:
        self.opened_at = time.perf_counter()
        super().open()


class Gated:
    """A mixin for the views that are compared: a request that brings a gate stays at it."""

    def work(self, request: Any) -> Any:
        created = super().work(request)  # type: ignore[misc]
        if gate := request.META.get(GATE):
            gate.pass_through()
        return created


class Crowd:
    """As many threads as there are duplicates. Their connections are open before anything is timed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(size)

    def __enter__(self) -> Self:
        self._in_each_thread(lambda: connection.ensure_connection())
        return self

    def __exit__(self, *error: object) -> None:
        self._in_each_thread(lambda: connection.close())
        self._pool.shutdown()

    def rush(self, calls: Sequence[Callable[[], T]]) -> tuple[float, list[Future[T]]]:
        """Start the calls together, one for each thread. When they started, and their results."""
        started: list[float] = []
        barrier = threading.Barrier(len(calls) + 1, action=lambda: started.append(time.perf_counter()))

        def run(call: Callable[[], T]) -> T:
            barrier.wait(PATIENCE)
            return call()

        futures = [self._pool.submit(run, call) for call in calls]
        barrier.wait(PATIENCE)
        return started[0], futures

    def _in_each_thread(self, call: Callable[[], object]) -> None:
        _, futures = self.rush([call] * self.size)
        for future in futures:
            future.result(PATIENCE)
