"""Clients that never stop, a primary that is killed, and the standby that is promoted in its place.

While they run, the network between the two servers stands still: the primary goes on, and the standby gets nothing.
Then the primary is killed, the standby is promoted, and the clients go on there. What they were told is compared with
what the new primary holds.
"""

import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from testproject import embedded
from testproject.embedded import embedded_postgres
from tests.crash.storms import CLIENTS, ENOUGH, Storms, storms_on
from tests.harness.postgres import Server, running_standby
from tests.harness.proxy import Proxy
from tests.harness.world import Database, environment, migrate
from tests.harness.zygote import ROOT, wait_until

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


@dataclass
class Failover:
    mode: str
    storms: Storms
    #: Whether ``check --database default`` had said that what was acknowledged may be lost.
    warned: bool

    @property
    def is_as_expected(self):
        """A control that loses and doubles nothing shows nothing."""
        is_safe = self.storms.is_safe
        return self.storms.is_whole and is_safe == (self.mode in SAFE) == (not self.warned)


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
    with running_pair(mode) as pair:
        warned = warns(pair.primary.url)
        with storms_on(pair.url) as (storms, provider):
            storms.get_further()
            pair.lag()
            with closing(Database(pair.primary.url)) as database:
                get_further_or_wait(storms, database)
            pair.fail_over()
            storms.get_further()
            storms.settle(pair.standby.url, provider)
        return Failover(mode, storms, warned)


def warns(url):
    """Whether the package's check of the database warns."""
    check = [sys.executable, "manage.py", "check", "--database", "default"]
    settings = {**environment(url), "DJANGO_SETTINGS_MODULE": "testproject.settings"}
    said = subprocess.run(check, cwd=ROOT, env=settings, check=True, capture_output=True, text=True).stderr
    return "idempotency.W015" in said or "idempotency.W013" in said


def acknowledged(storms):
    return [len(storm.known) for storm in storms.all]


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
