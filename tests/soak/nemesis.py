"""The faults and their schedule: the seed determines the schedule, and each fault is verified to strike."""

import os
import random
import signal
import time
from collections import Counter
from contextlib import closing, suppress
from functools import partial

from testproject.harness.processes import wait_until
from tests.harness.world import LONG_AGO, Database

#: Longer than the lease, in real time, because a provider judges a late call by its own clock.
FROZEN = 2.5  # seconds
#: How far the database's clock jumps forwards and back. A provider accepts the call of a payout for half of its lease,
#: by a clock that doesn't jump. After a longer jump the lease would be over while the call may still be made. For the
#: same reason END_LEASES spares the leases of payouts.
JUMP = 0.9  # seconds
#: How many seconds the clients have to notice a fault, and how often a fault that strikes nothing is tried.
NOTICED, TRIES = 30.0, 3

#: Ends the leases of messages and of operations in one transaction early.
END_LEASES = """
WITH records AS (
    UPDATE idempotency_record SET lease_expires_at = %s WHERE id IN (
        SELECT id FROM idempotency_record WHERE status = 'in_progress' AND operation <> 'payouts.create'
        FOR UPDATE SKIP LOCKED
    ) RETURNING id
), messages AS (
    UPDATE idempotency_outbox_message SET lease_expires_at = %s WHERE id IN (
        SELECT id FROM idempotency_outbox_message WHERE status = 'pending' AND lease_expires_at IS NOT NULL
        FOR UPDATE SKIP LOCKED
    ) RETURNING id
)
SELECT (SELECT count(*) FROM records) + (SELECT count(*) FROM messages)
"""


class Nemesis:
    def __init__(self, servers, load, seed):
        self.servers, self.load = servers, load
        self.planned = Counter()
        self.struck = Counter()
        self._chance = random.Random(seed)
        relay, consumer, sweep = (servers.daemons[name] for name in ("relay", "consumer", "sweep"))
        #: Each fault, and the count of ``seen`` that grows when it strikes.
        self.acts = {
            "kill a worker": (self._kill_worker, "broken"),
            "freeze a worker": (lambda: self._freeze(self._chance.choice(servers.workers())), "late"),
            "stop the database": (servers.database.restart, "errors"),
            "kill the pooler": (servers.pooler.restart, "errors"),
            "end leases": (self._end_leases, "ended"),
            "move the clock": (self._move_clock, "jumped"),
            "kill the broker": (partial(self._kill, servers.redis), "killed"),
            "kill the relay": (partial(self._kill, relay), "killed"),
            "kill the consumer": (partial(self._kill, consumer), "killed"),
            "freeze the relay": (lambda: self._freeze(relay.pid), "frozen"),
            "freeze the sweep": (lambda: self._freeze(sweep.pid), "frozen"),
        }

    def schedule(self, requests, pace):
        """After how many requests each fault strikes. Each strikes once before one is repeated."""
        at, acts = 0, list[str]()
        while (at := at + self._chance.randint(pace // 2, pace * 3 // 2)) < requests:
            acts = acts or self._chance.sample(list(self.acts), len(self.acts))
            yield at, acts.pop()

    def strike(self, name):
        self.servers.supervise()
        self.planned[name] += 1
        act, notice = self.acts[name]
        for _ in range(TRIES):
            before = self.load.seen[notice]
            act()
            with suppress(TimeoutError):
                wait_until(lambda before=before: self.load.seen[notice] > before, name, NOTICED)
                self.struck[name] += 1
                return

    def _kill_worker(self):
        os.kill(self._chance.choice([each for each in self.servers.workers() if each != self.servers.elder]), 9)

    def _kill(self, daemon):
        self.load.seen["killed"] += daemon.alive
        daemon.kill()
        daemon.start()

    def _freeze(self, process):
        os.kill(process, signal.SIGSTOP)
        time.sleep(FROZEN)
        os.kill(process, signal.SIGCONT)
        self.load.seen["frozen"] += 1

    def _move_clock(self):
        with closing(Database(self.servers.database.url)) as database:
            before = self._ahead(database)
            self.servers.database.move_clock(0.0 if before > JUMP / 2 else JUMP)
            self.load.seen["jumped"] += abs(self._ahead(database) - before) > JUMP / 2

    def _ahead(self, database):
        """By how many seconds the database's clock is ahead of this machine's."""
        return float(database.query("SELECT extract(epoch FROM clock_timestamp())")[0][0]) - time.time()

    def _end_leases(self):
        with closing(Database(self.servers.database.url)) as database, suppress(TimeoutError):
            ended = wait_until(lambda: database.count(END_LEASES, LONG_AGO, LONG_AGO), "a lease to end", NOTICED)
            self.load.seen["ended"] += ended
