"""Clients that never stop, while some of them freeze and their PostgreSQL is stopped.

At the end every operation is delivered once more. Then a record must explain the clients' responses, and the effects
are counted in the database and in the ledger of the provider, which does not deduplicate.
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
from tests.harness.history import PARKED, Call, by_key, violations
from tests.harness.postgres import Server
from tests.harness.world import Database, environment, migrate
from tests.harness.zygote import Zygote, wait_until

#: The number of client pairs by declaration. Both clients of a pair send the same keys.
PAIRS = {"inside": 2, "ask": 1, "park": 1}
#: How long a claim left by a crash blocks its key, in seconds of real time. Nothing is back-dated here.
LEASE = 0.5
#: Operations of each declaration that are acknowledged before the faults, and after them.
ENOUGH = 20


class Storm:
    """Running clients of one declaration, each in its own process, and their responses."""

    def __init__(self, zygote, declaration, provider, marks):
        self.calls = []
        #: Keys whose outcome clients know, and keys whose operation is parked.
        self.known, self.parked = set(), set()
        #: Keys with answers that no record explains.
        self.unexplained = {}
        #: The numbers of acknowledged operations without an effect, and of operations with several.
        self.lost = self.doubled = 0
        self.name = f"storm-{uuid4().hex[:8]}"  # the database may contain effects of other storms
        self._declaration, self._marks = declaration, marks
        spec = {
            "declaration": declaration,
            "operation": f"crash.storm.{declaration}",
            "provider": None if declaration == "inside" else provider.url,
            "lease": LEASE,
            "answers": KEPT,
            "marks": str(marks.directory),
        }
        prefixes = [f"{self.name}-pair-{number // 2}" for number in range(2 * PAIRS[declaration])]
        self._clients = [(zygote.fork(job="storm", prefix=prefix, **spec), prefix) for prefix in prefixes]

    def hear(self):
        """Read the answers that clients have received so far.

        :returns: how many outcomes they know.
        """
        for line in self._marks.notes(f"calls.{self._declaration}")[len(self.calls) :]:
            call = Call.of(line)
            self.calls.append(call)
            if call.answer == PARKED:
                self.parked.add(call.key)
            elif call.outcome is not None:
                self.known.add(call.key)
        return len(self.known)

    def overtake_one(self, lots):
        """Freeze a client while its handler runs, and wake it after its lease, when its twin has overtaken it."""
        client, prefix = lots.choice(self._clients)
        self._marks.leave(f"freeze.{client.pid}")
        client.wait_until_stopped()
        reached = self._reached_by(prefix)
        wait_until(lambda: self._reached_by(prefix) >= reached + 2, "a client overtakes its frozen twin")
        client.wake()

    def _reached_by(self, prefix):
        self.hear()
        return sum(key.startswith(f"{prefix}-") for key in self.known)

    def redeliver(self):
        """Let every client finish its current operation, and then request each outcome once more, as clients and queues
        do that have missed an answer.
        """
        for client, _ in self._clients:
            client.go()
        for client, _ in self._clients:
            client.expect("redelivered")
            client.end()
        self.hear()
        self.unexplained = violations(self.calls, lease=LEASE)

    def judge(self, effects):
        judged = judge_effects(effects, self.known)
        self.lost, self.doubled = len(judged.lost), len(judged.doubled)

    def __repr__(self):
        return (
            f"{len(self.known)} acknowledged, {len(self.parked)} parked, lost {self.lost}, doubled {self.doubled}, "
            f"{len(self.unexplained)} unexplained: {[*self.unexplained.values()][:1]}"
        )


@dataclass
class Storms:
    """The storms of all declarations."""

    inside: Storm
    ask: Storm
    park: Storm
    #: Rows without their outcome or with another attempt's outcome, and outcomes without their row.
    torn: int = 0

    @property
    def all(self):
        return self.inside, self.ask, self.park

    @property
    def is_safe(self):
        return self.is_whole and not any(storm.unexplained or storm.doubled for storm in self.all)

    @property
    def is_whole(self):
        """Even if records are lost: nothing in the database is torn or doubled, and each outcome has its effect."""
        return not (self.torn or self.inside.doubled or any(storm.lost for storm in self.all))

    @property
    def acknowledged(self):
        return sum(len(storm.known) for storm in self.all)

    @property
    def figures(self):
        """Figures for the evidence page."""
        return {
            "histories": sum(len(by_key(storm.calls)) for storm in self.all),
            "invocations": sum(len(storm.calls) for storm in self.all),
            "unexplained": sum(len(storm.unexplained) for storm in self.all),
        }

    def get_further(self, *storms, by=ENOUGH, otherwise=lambda: False):
        """Wait until the clients of ``storms``, by default all, know ``by`` more outcomes, or ``otherwise`` holds."""
        enough = [(storm, storm.hear() + by) for storm in storms or self.all]
        wait_until(
            lambda: otherwise() or all(storm.hear() >= number for storm, number in enough),
            f"the clients learn {by} outcomes",
        )

    def settle(self, url, provider):
        """Let the clients finish. Judge their answers and the effects in the database of ``url`` and the ledger."""
        for storm in self.all:
            storm.redeliver()
        with closing(Database(url)) as database:
            self.inside.judge(database.transfers(self.inside.name))
            self.torn = torn(database, self.inside.name)
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
        # Closing it ends the clients.
        zygote = stack.enter_context(closing(Zygote("tests.crash.worker", environment(url), directory / "log")))
        yield Storms(**{each: Storm(zygote, each, provider, Marks(directory)) for each in PAIRS}), provider


@contextmanager
def server_to_stop():
    """A private server, with the tables."""
    with embedded_postgres() as url:
        migrate(url)
        yield Server(url)


def run_restarts(server, rounds, *, seed=0):
    """Freeze clients and stop the server with ``-m immediate`` under load, ``rounds`` times, and judge."""
    lots = random.Random(seed)
    with closing(Database(server.url)) as database:
        database.query("CHECKPOINT")  # a control must lose acknowledged outcomes, not the tables
    with storms_on(server.url) as (storms, provider):
        for _ in range(rounds):
            for storm in storms.all:
                storm.overtake_one(lots)
            # Under load: since the last restart, a few or many operations were acknowledged.
            storms.get_further(storms.inside, by=lots.randint(20, 120))
            server.restart()
        storms.get_further()
        storms.settle(server.url, provider)
    return storms
