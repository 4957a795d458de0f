"""Clients that never stop, a primary that is killed, and the standby that is promoted in its place.

While they run, the network between the two servers stands still: the primary goes on, and the standby gets nothing.
Then the primary is killed, the standby is promoted, and the clients go on there. What they were told is compared with
what the new primary holds, and with the ledger of the provider. In the end every operation is delivered once more.
"""

import subprocess
import sys
import tempfile
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from testproject import embedded
from testproject.embedded import embedded_postgres
from testproject.provider import running_provider
from tests.crash.storms import Storm, Tally
from tests.harness.postgres import Server, running_standby
from tests.harness.proxy import Proxy
from tests.harness.world import Database, environment, migrate
from tests.harness.zygote import ROOT, Zygote, wait_until

STANDBY = "standby_1"
NAMED = {"synchronous_standby_names": f"ANY 1 ({STANDBY})"}
#: What the primary is told, by what it then waits for before it confirms a COMMIT.
MODES = {
    "asynchronous": {},
    "local": {**NAMED, "synchronous_commit": "local"},
    "remote_write": {**NAMED, "synchronous_commit": "remote_write"},
    "on": {**NAMED, "synchronous_commit": "on"},
    "remote_apply": {**NAMED, "synchronous_commit": "remote_apply"},
}
#: Where a COMMIT waits for the standby.
SAFE = ("remote_write", "on", "remote_apply")
#: How many clients there are of each declaration. The provider deduplicates for none of them.
CLIENTS = {"inside": 3, "ask": 2, "park": 3}
#: Operations of each declaration that are acknowledged before, during and after the lag.
ENOUGH = 20


@dataclass
class Failover:
    """What became of the operations of each declaration.

    Rows are lost or not before every operation has been delivered once more. All else is counted after it.
    """

    mode: str
    inside: Tally
    ask: Tally
    park: Tally
    #: A row without its outcome, or an outcome without its row.
    torn: int
    #: Whether ``check --database default`` had said so.
    warned: bool

    @property
    def is_safe(self):
        return self.is_whole and not (self.inside.lost or self.ask.doubled or self.park.doubled)

    @property
    def is_whole(self):
        """Whatever was lost: in the database nothing is torn or doubled, and no call of the provider is missing."""
        return not (self.torn or self.inside.doubled or self.ask.lost or self.park.lost)

    @property
    def is_as_expected(self):
        """A control that loses and doubles nothing shows nothing."""
        return self.is_whole and self.is_safe == (self.mode in SAFE) == (not self.warned)


class Pair:
    """A primary, its standby, and the network between them."""

    def __init__(self, primary, standby, network):
        self.primary, self.standby, self._network = primary, standby, network
        #: Clients look for the one that takes writes, as libpq does for them.
        self.url = embedded.url_of(primary.directory, standby.directory) + "&target_session_attrs=read-write"

    def lag(self):
        self._network.holding = True

    def fail_over(self):
        self.primary.kill()
        self._network.cut()  # and what was under way in it is gone
        self.standby.promote()


@contextmanager
def running_pair(mode):
    with ExitStack() as stack:
        url = stack.enter_context(embedded_postgres())
        migrate(url)
        primary = Server(url)
        network = stack.enter_context(Proxy(url))
        socket = Path(parse_qs(urlsplit(network.url).query)["host"][0], embedded.SOCKET_NAME)
        for path in (socket.parent, socket):
            path.chmod(0o777)  # the standby may run as another user
        standby = stack.enter_context(running_standby(network.url, STANDBY))
        with closing(Database(url)) as database:
            streaming = "SELECT sync_state FROM pg_stat_replication WHERE application_name = %s AND state = 'streaming'"
            wait_until(lambda: database.query(streaming, STANDBY), "the standby streams")
            primary.configure(**MODES[mode])
            if "synchronous_standby_names" in MODES[mode]:
                wait_until(lambda: database.query(streaming, STANDBY) == [("quorum",)], "the standby is synchronous")
        yield Pair(primary, standby, network)
        with suppress(embedded.EmbeddedPostgresError):
            primary.start()  # so that it gives back the shared memory that a killed server leaves


def run_failover(mode):
    with ExitStack() as stack:
        pair = stack.enter_context(running_pair(mode))
        warned = warns(pair.primary.url)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="failover-")))
        provider = stack.enter_context(running_provider(directory / "ledger.jsonl"))
        zygote = stack.enter_context(closing(Zygote("tests.crash.worker", environment(pair.url), directory / "log")))
        storms = {
            name: Storm(zygote, clients, name, None if name == "inside" else provider.url)
            for name, clients in CLIENTS.items()
        }
        get_further(storms)
        pair.lag()
        with closing(Database(pair.primary.url)) as database:
            get_further_or_wait(storms, database)
        pair.fail_over()
        get_further(storms)
        for storm in storms.values():
            storm.stop()
        with closing(Database(pair.standby.url)) as database:
            torn = settle(storms, database, provider)
        return Failover(mode, **{name: storm.tally for name, storm in storms.items()}, torn=torn, warned=warned)


def warns(url):
    """Whether the package's check of the database warns."""
    check = [sys.executable, "manage.py", "check", "--database", "default"]
    settings = {**environment(url), "DJANGO_SETTINGS_MODULE": "testproject.settings"}
    said = subprocess.run(check, cwd=ROOT, env=settings, check=True, capture_output=True, text=True).stderr
    return "idempotency.W015" in said or "idempotency.W013" in said


def acknowledged(storms):
    return [len(storm.tally.known) for storm in storms.values()]


def get_further(storms):
    for storm in storms.values():
        storm.get_further(ENOUGH, "operations on a primary")


def get_further_or_wait(storms, database):
    """Until clients were told enough that the standby doesn't know, or each of them waits for the standby."""
    enough = [known + ENOUGH for known in acknowledged(storms)]
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    wait_until(
        lambda: (
            all(now >= then for now, then in zip(acknowledged(storms), enough, strict=True))
            or database.count(waiting) == sum(CLIENTS.values())
        ),
        "clients go on without the standby, or wait for it",
    )


def settle(storms, database, provider):
    """Judge what there is on the new primary.

    :returns: how many rows were torn.
    """
    inside = storms["inside"]
    inside.tally.judge(database.transfers(inside.name))
    lost, found_torn = inside.tally.lost, torn(database, inside.name)
    for storm in storms.values():
        storm.redeliver()
    for name, storm in storms.items():
        effects = database.transfers if name == "inside" else provider.payouts
        storm.tally.judge(effects(storm.name))
    inside.tally.lost = lost
    return found_torn


def torn(database, prefix):
    """How many rows have no outcome, and how many outcomes no row."""
    return database.count(
        "SELECT count(*) FROM (SELECT label FROM testproject_transfer WHERE label LIKE %s) AS effect FULL JOIN "
        "(SELECT idempotency_key FROM idempotency_record WHERE status = 'completed' AND idempotency_key LIKE %s) AS "
        "record ON record.idempotency_key = effect.label WHERE record.idempotency_key IS NULL OR effect.label IS NULL",
        f"{prefix}-%",
        f"{prefix}-%",
    )
