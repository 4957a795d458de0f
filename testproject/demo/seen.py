"""Counters of what the clients see while the storm runs, and the marks that the processes of the server leave."""

from __future__ import annotations

import threading
from collections import Counter
from enum import Enum

from testproject.harness.strikes import Marks


class Seen(str, Enum):
    """One thing that was seen to happen, on one side."""

    ATTEMPT = "attempt"  # a request was sent
    REPLAY = "replay"  # a recorded outcome came back
    CONFLICT = "conflict"  # 409: another attempt is at work
    KEY_REUSED = "key_reused"  # 422: the key belongs to another payload
    CUT = "cut"  # the client reset the connection
    TIMEOUT = "timeout"  # the client stopped waiting
    BROKEN = "broken"  # the connection broke, as it does when a worker is killed
    UNAVAILABLE = "unavailable"  # 503
    PROVIDER_FAILED = "provider_failed"  # 502: the provider timed out or failed, and may have paid
    ERROR = "error"  # any other 5xx
    KILLED_AT_WORK = "killed_at_work"  # a charge lost its worker at the point it had chosen
    OUTLIVED = "outlived"  # a stalled worker woke up, lost its claim and writes, and answered what the winner had done
    DONE = "done"  # all clients of a charge know its outcome, or gave up


class Tally:
    """How often each thing was seen on each side. Safe to use from every thread."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, Seen]] = Counter()

    def add(self, side: str, seen: Seen) -> None:
        with self._lock:
            self._counts[side, seen] += 1

    def of(self, side: str) -> Counter[str]:
        with self._lock:
            return Counter({seen.value: count for (where, seen), count in self._counts.items() if where == side})
