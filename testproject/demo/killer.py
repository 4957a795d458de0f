"""Who kills relay, worker and broker, each where it hurts most: it decides at the places where they stop and ask.

Each process that takes part says where it is, and goes on when it is told to (``consumer``). So every kill hits the
message that it was planned for, at the place that it was planned for.
"""

from __future__ import annotations

import os
import signal
import socketserver
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .consumer import GO, VISIBILITY_TIMEOUT
from .orders import Kill, Side, Strike
from .processes import Daemon, ProcessError

#: How long a broker stays away: long enough that what was under way counts as not acknowledged when it is back.
OUTAGE = VISIBILITY_TIMEOUT + 0.2  # seconds

#: Kombu takes a message out of a Redis list, and then notes in Redis that it has it. A worker that dies in between, or
#: whose broker does, loses it, and nobody can know. So before either is killed the other processes are held at the next
#: place where they ask, if they get there within HOLD; and a worker whose children are all held takes nothing more.
HOLD = 1.0  # seconds
SETTLE = 0.1  # seconds

#: After so many messages, counted over all relays, one dies. The first has nothing else in hand; what a later one had
#: is there twice, since a batch is marked at its end.
RELAY_DIES_AT = frozenset({1, 12})

#: Where somebody dies, if it isn't when a message is done with and not acknowledged.
PLACES = {Strike.CHILD_AT_START: "started", Strike.CHILD_AT_WORK: "at_work"}


@dataclass(frozen=True)
class Report:
    """Where a process is."""

    role: str
    pid: int
    place: str
    topic: str = ""
    label: str = ""
    message_id: str = ""


class Killer:
    """Listens on a Unix socket at ``address``. Everything here is counted from what was reported."""

    def __init__(
        self,
        address: Path,
        relay: Daemon,
        worker: Daemon,
        broker: Daemon,
        strikes: Mapping[tuple[str, str], Strike],
        sides: Mapping[str, Side],
    ) -> None:
        self.kills: Counter[Kill] = Counter()
        self.deliveries: Counter[Side] = Counter()
        self.messages: defaultdict[Side, set[str]] = defaultdict(set)
        self.replays = 0
        self.error = ""
        self.generation = 0  # of the worker, so that nobody kills a child of one that is gone
        self._relay = relay
        self._worker = worker
        self._broker = broker
        self._strikes = dict(strikes)
        self._sides = sides
        # Held while somebody is being killed. What asks meanwhile is answered when that is over, or is dead by then.
        self._deciding = threading.Lock()
        self._held = threading.Semaphore(0)  # children of the worker that wait for the answer to their question
        self._resting = False
        self._relayed = 0
        self._server = _Listener(str(address), self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="killer", daemon=True)
        self._thread.start()

    def rest(self) -> None:
        """Kill nobody any more, and start nobody again."""
        with self._deciding:
            self._resting = True

    def close(self) -> None:
        """Stop listening. Called when the processes have ended."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def decide(self, report: Report, generation: int) -> bool:
        """Whether the process may go on. If not, it is dead.

        :param generation: of the worker, as it was when the process connected.
        """
        if report.role == "worker":
            self._held.release()
        try:
            with self._deciding:
                if report.role == "worker":
                    self._held.acquire()
                    if generation != self.generation:
                        return False
                self._count(report)
                kill = self._due(report)
                return kill is None or self._carry_out(kill, report)
        except ProcessError as error:
            self.error = str(error)
            return False

    def _count(self, report: Report) -> None:
        side = self._sides.get(report.label)
        if side is None:
            return
        if report.place == "started":
            self.deliveries[side] += 1
            self.messages[side].add(report.message_id)
        elif report.place == "replayed":
            self.replays += 1

    def _due(self, report: Report) -> Kill | None:
        if self._resting:
            return None
        if report.role == "relay":
            self._relayed += 1
            return Kill.RELAY if self._relayed in RELAY_DIES_AT else None
        task = report.topic.rpartition(".")[2].removesuffix("_unprotected")
        strike = self._strikes.get((report.label, task))
        if strike is None or report.place != PLACES.get(strike, "ended"):
            return None
        del self._strikes[report.label, task]
        return {Strike.WORKER: Kill.WORKER, Strike.BROKER: Kill.BROKER}.get(strike, Kill.CHILD)

    def _carry_out(self, kill: Kill, report: Report) -> bool:
        if kill is Kill.RELAY:
            self._relay.kill()
            self._relay.start()
        elif kill is Kill.CHILD:
            os.kill(report.pid, signal.SIGKILL)
        elif kill is Kill.WORKER:
            self._hold_the_others()
            self._worker.kill()
            self.generation += 1
            self._worker.start()
        else:
            self._hold_the_others()
            self._broker.kill()
            time.sleep(OUTAGE)
            self._broker.start()
        self.kills[kill] += 1
        return kill is Kill.BROKER

    def _hold_the_others(self) -> None:
        """Return when another child waits for its answer, or when none has come for a while."""
        if self._held.acquire(timeout=HOLD):
            self._held.release()
        time.sleep(SETTLE)


class _Listener(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: str, killer: Killer) -> None:
        super().__init__(address, _Conversation)
        self.killer = killer


class _Conversation(socketserver.StreamRequestHandler):
    """One process, for as long as it lives."""

    server: _Listener

    def handle(self) -> None:
        generation = self.server.killer.generation
        try:
            for line in self.rfile:
                role, pid, place, *words = line.decode("ascii").split()
                if not self.server.killer.decide(Report(role, int(pid), place, *words), generation):
                    return
                self.wfile.write(GO)
        except OSError:
            return  # it has died, by another's hand
