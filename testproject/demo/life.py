"""How a worker of the server ends: it kills itself, for a charge that has asked for it or at random.

Nobody is killed who stands still, or hardly any would ever wake up to find that its claim was taken over.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from testproject.harness.strikes import Marks

#: While this mark is there, workers die at random.
STORMY = "stormy"


class Life:
    """Of one worker of the server."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self._changed = threading.Condition()
        self._standing = 0

    def stand(self, name: str) -> None:
        with self._changed:
            self._standing += 1
            self.marks.leave(f"met.{name}")

    def go_on(self) -> None:
        with self._changed:
            self._standing -= 1
            self._changed.notify_all()

    def end(self, name: str) -> None:
        """Kill this worker for a charge, as soon as nobody stands still."""
        with self._changed:
            self._changed.wait_for(lambda: not self._standing)
            self.marks.leave(f"met.{name}")
            self._die()

    def end_at_random(self, mean: float) -> None:
        """Kill this worker in a storm, at a random time, whatever it is doing but standing still.

        :param mean: after so many seconds, on average.
        """
        chance = random.Random()  # of its own: forks have the same state of the shared one
        while True:
            time.sleep(chance.expovariate(1 / mean))
            with self._changed:
                if self.marks.exists(STORMY) and not self._standing:
                    self._die()

    def _die(self) -> None:
        self.marks.leave(f"died.{os.getpid()}")
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def stormy(marks: Marks) -> Iterator[None]:
    """Workers of the server die at random for as long as the block."""
    marks.leave(STORMY)
    try:
        yield
    finally:
        (marks.directory / STORMY).unlink()
