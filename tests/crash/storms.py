"""Clients that never stop, while the PostgreSQL under them is stopped.

What they were told is compared with what the database holds and with the ledger of the provider, which deduplicates for
none of them. In the end every operation is delivered once more.
"""

import random
import tempfile
import threading
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from testproject.embedded import embedded_postgres
from testproject.harness.effects import judge_effects
from testproject.provider import running_provider
from tests.harness.postgres import Server
from tests.harness.world import Database, environment, migrate
from tests.harness.zygote import PATIENCE, ImpossibleError, Zygote

#: How many clients there are of each declaration.
CLIENTS = {"inside": 3, "ask": 2, "park": 3}
#: How long a claim that a crash left is in the way, in seconds. By the real clock: nothing is back-dated here.
LEASE = 0.5
#: Operations of each declaration that are acknowledged before anything happens, and after it.
ENOUGH = 20


class Storm:
    """Clients of one declaration under way, each in a process of its own, and what they were told."""

    def __init__(self, zygote, declaration, provider):
        self.known = set()
        #: Operations whose outcome stayed unknown, and which are not run again.
        self.parked = set()
        #: Operations that were acknowledged and have no effect, and those that have several.
        self.lost = self.doubled = 0
        self.name = f"storm-{uuid4().hex[:8]}"  # the database may hold the effects of others
        self._zygote = zygote
        self._ended = {}
        self._changed = threading.Condition()
        self._errors = []
        self._spec = {
            "declaration": declaration,
            "operation": f"crash.storm.{declaration}",
            "provider": None if declaration == "inside" else provider.url,
            "lease": LEASE,
        }
        prefixes = [f"{self.name}-client-{number}" for number in range(CLIENTS[declaration])]
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
                    (self.parked if event["parked"] else self.known).add(event["key"])
                    self._changed.notify_all()
            if event is None or "operations" not in event:
                raise ImpossibleError(f"a client ended with {event}")
            self._ended[prefix] = event["operations"]
        except ImpossibleError as error:
            with self._changed:
                self._errors.append(str(error))
                self._changed.notify_all()

    def get_further(self, by=ENOUGH):
        """Wait until the clients know so many outcomes more."""
        enough = len(self.known) + by
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._errors) or len(self.known) >= enough, PATIENCE):
                raise ImpossibleError(f"the clients did not learn {by} outcomes within {PATIENCE} s")
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

    def judge(self, effects):
        judged = judge_effects(effects, self.known)
        self.lost, self.doubled = len(judged.lost), len(judged.doubled)

    def __repr__(self):
        return f"{len(self.known)} acknowledged, {len(self.parked)} parked, lost {self.lost}, doubled {self.doubled}"


@dataclass
class Storms:
    """Those of each declaration.

    Rows are lost or not before every operation has been delivered once more. All else is counted after it.
    """

    inside: Storm
    ask: Storm
    park: Storm
    #: Rows without their outcome or with that of another attempt, and outcomes without their row.
    torn: int = 0

    @property
    def all(self):
        return self.inside, self.ask, self.park

    @property
    def is_safe(self):
        return self.is_whole and not (self.inside.lost or self.ask.doubled or self.park.doubled)

    @property
    def is_whole(self):
        """Whatever was lost: in the database nothing is torn or doubled, and no call of the provider is missing."""
        return not (self.torn or self.inside.doubled or self.ask.lost or self.park.lost)

    def get_further(self):
        for storm in self.all:
            storm.get_further()

    def settle(self, url, provider):
        """Let the clients end, and judge what there is in the database of ``url`` and in the provider's ledger."""
        for storm in self.all:
            storm.stop()
        with closing(Database(url)) as database:
            self.inside.judge(database.transfers(self.inside.name))
            lost, self.torn = self.inside.lost, torn(database, self.inside.name)
            for storm in self.all:
                storm.redeliver()
            self.inside.judge(database.transfers(self.inside.name))
        self.inside.lost = lost
        for storm in (self.ask, self.park):
            storm.judge(provider.payouts(storm.name))


def torn(database, prefix):
    labels = f"{prefix}-%"
    rows = dict(database.query("SELECT label, recipient FROM testproject_transfer WHERE label LIKE %s", labels))
    completed = "SELECT idempotency_key, 'attempt ' || (response_body ->> 'attempt') FROM idempotency_record"
    outcomes = dict(database.query(f"{completed} WHERE status = 'completed' AND idempotency_key LIKE %s", labels))
    return sum(rows.get(label) != outcomes.get(label) for label in rows.keys() | outcomes.keys())


@contextmanager
def storms_on(url):
    """Clients on the database of ``url``, and the provider that they call."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="storm-")))
        provider = stack.enter_context(running_provider(directory / "ledger.jsonl"))
        # It ends the clients that are left.
        zygote = stack.enter_context(closing(Zygote("tests.crash.worker", environment(url), directory / "log")))
        yield Storms(**{declaration: Storm(zygote, declaration, provider) for declaration in CLIENTS}), provider


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
    with storms_on(server.url) as (storms, provider):
        for _ in range(rounds):
            # In mid-load: clients have got through since the last restart, a few or many of them.
            storms.inside.get_further(lots.randint(20, 120))
            server.restart()
        storms.get_further()
        storms.settle(server.url, provider)
    return storms
