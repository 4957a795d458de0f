"""Clients that never stop, while the PostgreSQL under them is stopped.

What they were told is compared with what the database holds and with the ledger of the provider, which deduplicates for
none of them. In the end every operation is delivered once more.
"""

import random
import tempfile
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from testproject.embedded import embedded_postgres
from testproject.harness.effects import judge_effects
from testproject.harness.marks import Marks
from testproject.provider import running_provider
from tests.harness.answers import KEPT, recorded_facts
from tests.harness.postgres import Server
from tests.harness.world import Database, environment, migrate
from tests.harness.zygote import Zygote, wait_until

#: How many clients there are of each declaration.
CLIENTS = {"inside": 3, "ask": 2, "park": 3}
#: How long a claim that a crash left is in the way, in seconds. By the real clock: nothing is back-dated here.
LEASE = 0.5
#: Operations of each declaration that are acknowledged before anything happens, and after it.
ENOUGH = 20


class Storm:
    """Clients of one declaration under way, each in a process of its own, and what they were told."""

    def __init__(self, zygote, declaration, provider, marks):
        #: Operations whose outcome clients know, and those whose outcome stayed unknown, which are not run again.
        self.known, self.parked = set(), set()
        #: Operations that were acknowledged and have no effect, and those that have several.
        self.lost = self.doubled = 0
        self.name = f"storm-{uuid4().hex[:8]}"  # the database may hold the effects of others
        self._declaration, self._marks = declaration, marks
        spec = {
            "declaration": declaration,
            "operation": f"crash.storm.{declaration}",
            "provider": None if declaration == "inside" else provider.url,
            "lease": LEASE,
            "answers": KEPT,
            "marks": str(marks.directory),
        }
        prefixes = [f"{self.name}-client-{number}" for number in range(CLIENTS[declaration])]
        self._clients = [zygote.fork(job="storm", prefix=prefix, **spec) for prefix in prefixes]

    def hear(self):
        """Hear what clients were told so far.

        :returns: how many outcomes they know.
        """
        for kind, keys in (("known", self.known), ("parked", self.parked)):
            keys.update(self._marks.notes(f"{kind}.{self._declaration}"))
        return len(self.known)

    def go_until(self, place):
        """Let every client learn the outcome of the operation that it is at; or, after that, of each one once more, as
        clients and queues ask that have missed an answer.
        """
        for client in self._clients:
            client.go()
        for client in self._clients:
            client.expect(place)
        self.hear()

    def end(self):
        for client in self._clients:
            client.end()

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

    def get_further(self, *storms, by=ENOUGH, otherwise=lambda: False):
        """Wait until the clients of ``storms``, by default all, know so many outcomes more, or ``otherwise`` holds."""
        enough = [(storm, storm.hear() + by) for storm in storms or self.all]
        wait_until(
            lambda: otherwise() or all(storm.hear() >= number for storm, number in enough),
            f"the clients learn {by} outcomes",
        )

    def settle(self, url, provider):
        """Let the clients end, and judge what there is in the database of ``url`` and in the provider's ledger."""
        for storm in self.all:
            storm.go_until("stopped")
        with closing(Database(url)) as database:
            self.inside.judge(database.transfers(self.inside.name))
            lost, self.torn = self.inside.lost, torn(database, self.inside.name)
            for storm in self.all:
                storm.go_until("redelivered")
                storm.end()
            self.inside.judge(database.transfers(self.inside.name))
        self.inside.lost = lost
        for storm in (self.ask, self.park):
            storm.judge(provider.payouts(storm.name))


def torn(database, prefix):
    """How many operations have a row without its outcome, or the reverse."""
    labels = f"{prefix}-%"
    rows = dict(database.query("SELECT label, recipient FROM testproject_transfer WHERE label LIKE %s", labels))
    completed = "SELECT idempotency_key, response_body, response_reference FROM idempotency_record"
    found = database.query(f"{completed} WHERE status = 'completed' AND idempotency_key LIKE %s", labels)
    outcomes = {key: f"attempt {recorded_facts(*outcome)['attempt']}" for key, *outcome in found}
    return sum(rows.get(label) != outcomes.get(label) for label in rows.keys() | outcomes.keys())


@contextmanager
def storms_on(url):
    """Clients on the database of ``url``, and the provider that they call."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="storm-")))
        provider = stack.enter_context(running_provider(directory / "ledger.jsonl"))
        # It ends the clients.
        zygote = stack.enter_context(closing(Zygote("tests.crash.worker", environment(url), directory / "log")))
        yield Storms(**{each: Storm(zygote, each, provider, Marks(directory)) for each in CLIENTS}), provider


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
            storms.get_further(storms.inside, by=lots.randint(20, 120))
            server.restart()
        storms.get_further()
        storms.settle(server.url, provider)
    return storms
