"""Clients that never stop, on a PostgreSQL that is stopped in mid-load.

What every client was told is compared with what the database holds at the end.
"""

import random
import threading
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from uuid import uuid4

from testproject.embedded import embedded_postgres
from testproject.harness.effects import judge_effects
from tests.harness.postgres import Server
from tests.harness.world import Database, environment, migrate
from tests.harness.zygote import PATIENCE, ImpossibleError, Zygote

CLIENTS = 6
#: How long a claim that a crash left is in the way, in seconds. By the real clock: nothing is back-dated here.
LEASE = 0.5
OPERATION = "crash.storm"


@dataclass
class Tally:
    """What the clients were told."""

    known: set[str] = field(default_factory=set)
    requests: int = 0
    #: Operations whose outcome stayed unknown, and which are not run again.
    parked: set[str] = field(default_factory=set)
    restarts: int = 0
    #: What became of it: operations that were acknowledged and have no effect, and those that have several.
    lost: int = 0
    doubled: int = 0
    stale_writes: int = 0

    @property
    def passed(self):
        return not (self.lost or self.doubled or self.stale_writes)

    def judge(self, effects):
        judged = judge_effects(effects, self.known)
        self.lost, self.doubled = len(judged.lost), len(judged.doubled)

    def __str__(self):
        return (
            f"{len(self.known)} operations acknowledged in {self.requests} requests; {self.restarts} restarts; "
            f"acknowledged and lost {self.lost}, doubled {self.doubled}, stale writes {self.stale_writes}"
        )


class Storm:
    """Clients under way, each in a process of its own, and a tally that grows while they report."""

    def __init__(self, zygote, clients=CLIENTS, declaration="inside", provider=None):
        """
        :param provider: the address of what the operation calls, if it does.
        """
        self.tally = Tally()
        self.name = f"storm-{uuid4().hex[:8]}"  # the database may hold the effects of others
        self._zygote = zygote
        self._ended = {}
        self._changed = threading.Condition()
        self._errors = []
        self._spec = {
            "declaration": declaration, "operation": f"{OPERATION}.{declaration}", "provider": provider, "lease": LEASE
        }  # fmt: skip
        prefixes = [f"{self.name}-client-{number}" for number in range(clients)]
        self._workers = [zygote.fork(job="storm", prefix=prefix, **self._spec) for prefix in prefixes]
        self._readers = [
            threading.Thread(target=self._read, args=each) for each in zip(self._workers, prefixes, strict=True)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, worker, prefix):
        try:
            while (event := worker.hear()) is not None and event["event"] == "known":
                with self._changed:
                    (self.tally.parked if event["parked"] else self.tally.known).add(event["key"])
                    self.tally.requests += event["asked"]
                    self._changed.notify_all()
            if event is None or "operations" not in event:
                raise ImpossibleError(f"a client ended with {event}")
            self._ended[prefix] = event["operations"]
        except ImpossibleError as error:
            with self._changed:
                self._errors.append(str(error))
                self._changed.notify_all()

    def get_further(self, by, what):
        """Wait until the clients know so many outcomes more."""
        known = self.tally.known
        enough = len(known) + by
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._errors) or len(known) >= enough, PATIENCE):
                raise ImpossibleError(f"the clients did not get there within {PATIENCE} s: {what}")
            if self._errors:
                raise ImpossibleError("; ".join(self._errors))

    def stop(self):
        """Let every client learn the outcome of what it is at, and end."""
        for worker in self._workers:
            worker.go()
        for reader in self._readers:
            reader.join(PATIENCE)
        for worker in self._workers:
            worker.end()
        if self._errors or any(reader.is_alive() for reader in self._readers):
            raise ImpossibleError(f"a client did not end: {self._errors}")

    def redeliver(self):
        """After ``stop``: ask once more for every operation, as clients and queues do that have missed an answer."""
        again = [
            self._zygote.fork(job="redeliver", prefix=prefix, operations=operations, **self._spec)
            for prefix, operations in self._ended.items()
        ]
        for worker in again:
            event = worker.expect("done")
            worker.end()
            if "redelivered" not in event:
                raise ImpossibleError(f"a redelivery ended with {event}")


@contextmanager
def server_to_stop():
    """A server of one's own, with the tables."""
    with embedded_postgres() as url:
        migrate(url)
        yield Server(url)


def run_restarts(server, rounds, *, seed=0):
    """Stop the server with ``-m immediate`` under load, ``rounds`` times, and count."""
    lots = random.Random(seed)
    with closing(Database(server.url)) as database:
        database.query("CHECKPOINT")  # a control is to lose what clients were told, and not the tables
    with closing(Zygote("tests.crash.worker", environment(server.url))) as zygote:  # which ends clients that are left
        storm = Storm(zygote)
        for _ in range(rounds):
            # In mid-load: clients have got through since the last restart, a few or many of them.
            storm.get_further(lots.randint(20, 120), "operations between restarts")
            server.restart()
            storm.tally.restarts += 1
        storm.get_further(20, "operations after the last restart")
        storm.stop()
    with closing(Database(server.url)) as database:
        storm.tally.judge(database.transfers(storm.name))
        storm.tally.stale_writes = database.count(
            "SELECT count(*) FROM testproject_transfer AS effect JOIN idempotency_record AS record "
            "ON record.idempotency_key = effect.label "
            "WHERE effect.label LIKE %s AND effect.recipient <> 'attempt ' || (record.response_body ->> 'attempt')",
            f"{storm.name}-%",
        )
    return storm.tally
