"""A process manager: it restarts processes that have died."""


class Keeper:
    """Restarts dead processes at each call of ``complaint``.

    Celery's workers sometimes end by themselves when their broker dies, because of faults in how they reconnect. So
    each outage of a broker excuses one end of each process.
    """

    def __init__(self, *starts, killed=lambda: 0, outages=lambda: 0):
        """``killed`` and ``outages`` return how often a process, and the broker, has been killed on purpose so far."""
        self.restarts = 0
        #: All processes that were ever started, dead or alive.
        self.started = [start() for start in starts]
        self._killed, self._outages = killed, outages
        self._running = dict(zip(starts, self.started, strict=True))

    def complaint(self):
        """Restart dead processes. Returns the problem, or an empty text."""
        for start, process in self._running.items():
            if not process.alive:
                self._running[start] = start()
                self.started.append(self._running[start])
                self.restarts += 1
        ended, excused = max(0, self.restarts - self._killed()), self._outages() * len(self._running)
        return "" if ended <= excused else f"ended by itself {ended} times, {excused} times with its broker"
