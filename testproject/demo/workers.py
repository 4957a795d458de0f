"""Who of the server's workers is alive, and who is to be killed, by what they report of themselves.

Each report is a line. ``born 123`` and ``gone 123`` come from gunicorn; the others from a request of a charge, here the
protected one of number 7, that has reached the point of its trouble: ``kill 123 protected 7`` asks for the end of its
worker, ``stalled 123 protected 7`` and ``awake 123 protected 7`` say that it stands still and goes on. ``reconciled 123
reconcile`` tells of a reconciler that has found an outcome.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
from collections import Counter

from .tally import Seen, Tally


class Workers:
    """The living workers. ``kills`` counts those that were killed so far."""

    def __init__(self, reports: socket.socket, tally: Tally) -> None:
        self.kills = 0
        self._reports = reports
        self._tally = tally
        self._alive: set[int] = set()
        # Stalled requests by worker, and the workers that are to be killed when they have none any more. A worker that
        # stands still is spared, or hardly any would ever wake up to find that its claim was taken over.
        self._stalled: Counter[int] = Counter()
        self._doomed: set[int] = set()
        self._lock = threading.Lock()
        self._listener = threading.Thread(target=self._listen, name="listener", daemon=True)
        self._listener.start()

    def alive(self) -> int:
        with self._lock:
            return len(self._alive)

    def kill_at_random(self, every: float, seed: int, stop: threading.Event) -> None:
        """Kill one of them about ``every`` seconds until ``stop`` is set, whatever it is doing but standing still."""
        chance = random.Random(f"{seed}:killer")
        while not stop.wait(every * chance.uniform(0.5, 1.5)):
            with self._lock:
                candidates = sorted(pid for pid in self._alive if not self._stalled[pid])
                if candidates:
                    self._kill(chance.choice(candidates))

    def close(self) -> None:
        """Stop listening. Called when the server has ended."""
        self._reports.shutdown(socket.SHUT_RDWR)
        self._listener.join()
        self._reports.close()

    def _listen(self) -> None:
        with self._reports.makefile(encoding="ascii") as lines:
            for line in lines:
                word, pid, *charge = line.split()
                # First the note: the client looks for it as soon as its connection breaks. A worker that was killed
                # before its stall was heard of doesn't wake up: that stall is still due.
                if word == "kill" or (word == "stalled" and self._lives(int(pid))):
                    self._tally.note_trouble(charge[0], int(charge[1]))
                elif word == "reconciled":
                    self._tally.add(charge[0], Seen.RECONCILED)
                with self._lock:
                    self._heard(word, int(pid))

    def _lives(self, pid: int) -> bool:
        with self._lock:
            return pid in self._alive

    def _heard(self, word: str, pid: int) -> None:
        if word == "born":
            self._alive.add(pid)
        elif word == "gone":
            self._forget(pid)
        elif word == "kill":
            # If it is dead, another charge was faster in the same worker.
            self._doomed.add(pid)
        elif word == "stalled":
            self._stalled[pid] += 1
        elif word == "awake":
            self._stalled[pid] -= 1
        if pid in self._doomed and not self._stalled[pid]:
            self._kill(pid)

    def _kill(self, pid: int) -> None:
        """SIGKILL a worker that is ours and alive. Called under the lock."""
        if pid in self._alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended by itself, and will be reported as gone
            else:
                self.kills += 1
        self._forget(pid)

    def _forget(self, pid: int) -> None:
        self._alive.discard(pid)
        self._doomed.discard(pid)
        del self._stalled[pid]
