"""Runs the relay, the broker and the worker that a message passes through, and kills and restarts them."""

import sys
import time
from collections import Counter
from datetime import timedelta
from itertools import cycle, islice

from idempotency.contrib.celery import resend_lost_messages
from idempotency.outbox import MessageStatus, OutboxMessage
from testproject.celery import app
from testproject.harness.processes import Daemon
from testproject.harness.redis import Redis
from testproject.models import Receipt

#: The total number of kills, spread over the messages. The worker's turn follows the broker's, because Celery workers
#: sometimes exit when their broker dies.
KILLS = 6
#: Seconds without a receipt, in which all messages in flight would have been redelivered. A message that is missing
#: then was lost: Redis loses it if a process takes it off the list and dies before it has recorded that.
QUIET = 4.0


class Hop:
    """The relay, the worker and the broker, and how often each was killed."""

    def __init__(self, redis: Redis, run: str, expected: int) -> None:
        """The protected orders' labels begin with ``run``, and ``expected`` of them must be accepted."""
        app.loader.import_default_modules()
        # The relay first, so that it sends messages while the worker starts.
        self.daemons = [
            Daemon(role, [sys.executable, "-m", "testproject.demo.consumer", role], redis.directory)
            for role in ("relay", "worker")
        ]
        self.figures = Counter(relay=0, worker=0, redis=0, resent=0)
        self._run = run
        relay, worker = self.daemons
        victims = islice(cycle([relay, redis, worker]), KILLS)
        self._kills = [(expected * (place + 1) // (KILLS + 1), victim) for place, victim in enumerate(victims)]
        self._receipts, self._since = 0, 0.0

    def is_over(self) -> bool:
        """Kill the next victim if it is due, restart what has died, and return whether every message was consumed."""
        for daemon in self.daemons:
            if not daemon.alive:
                daemon.start()
        receipts = Receipt.objects.filter(label__startswith=self._run).count()
        if self._kills and receipts >= self._kills[0][0]:
            _, victim = self._kills.pop(0)
            victim.kill()
            victim.start()
            self.figures[victim.name] += 1
        published = OutboxMessage.objects.filter(payload__contains=f'"{self._run}')
        now = time.monotonic()
        if receipts != self._receipts or published.filter(status=MessageStatus.PENDING).exists():
            self._receipts, self._since = receipts, now
        if now - self._since < QUIET:
            return False
        self._since = now
        lost = resend_lost_messages(older_than=timedelta(0), app=app)
        self.figures["resent"] += lost
        return not lost and not self._kills and receipts >= published.count()
