"""A process manager: it restarts what has died."""

import threading

from testproject.harness.processes import LOOK_EVERY


class Keeper:
    """Restarts processes that have died, until it is stopped.

    Celery's workers sometimes end by themselves when their broker dies, because of faults in how they reconnect. So
    each outage of a broker excuses one end of each process. ``complaint`` reports further ones.
    """

    def __init__(self, *starts, killed=lambda: 0, outages=lambda: 0):
        """``killed`` and ``outages`` return how often a process, and the broker, has been killed on purpose so far."""
        self.restarts = 0
        #: All processes that were ever started, dead or alive.
        self.started = [start() for start in starts]
        self.error = None
        self._killed, self._outages = killed, outages
        self._running = dict(zip(starts, self.started, strict=True))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="keeper", daemon=True)
        self._thread.start()

    def _keep(self):
        while not self._stopped.wait(LOOK_EVERY):
            for start, process in self._running.items():
                if process.alive:
                    continue
                try:
                    self._running[start] = start()
                except Exception as error:  # noqa: BLE001 - the owner's thread reports it
                    self.error = error
                    return
                self.started.append(self._running[start])
                self.restarts += 1

    @property
    def ended(self):
        """How many processes have ended by themselves."""
        return max(0, self.restarts - self._killed())

    def complaint(self):
        """What is wrong with the processes, or an empty text."""
        if self.error is not None:
            return f"could not be started again: {self.error}"
        excused = self._outages() * len(self._running)
        return "" if self.ended <= excused else f"ended by itself {self.ended} times, {excused} times with its broker"

    def stop(self):
        """Stop restarting processes. The running ones continue."""
        self._stopped.set()
        self._thread.join()
