"""Clients that never stop, a primary that is killed, and the standby that replaces it.

While they run, the network between the two servers is frozen: the primary continues, and the standby receives nothing.
Then the primary is killed, the standby is promoted, and the clients continue there. The responses they received are
compared with the new primary's data.
"""

import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from testproject import embedded
from tests.crash.storms import PAIRS, Storms, server_to_stop, storms_on
from tests.harness.postgres import running_standby
from tests.harness.proxy import Proxy
from tests.harness.world import Database, environment
from tests.harness.zygote import ROOT, wait_until

STANDBY = "standby_1"
NAMED = {"synchronous_standby_names": f"ANY 1 ({STANDBY})"}
#: The settings of the primary, by the event that it waits for before it confirms a COMMIT.
MODES = {
    "asynchronous": {},
    "local": {**NAMED, "synchronous_commit": "local"},
    "remote_write": {**NAMED, "synchronous_commit": "remote_write"},
    "on": {**NAMED, "synchronous_commit": "on"},
    "remote_apply": {**NAMED, "synchronous_commit": "remote_apply"},
}
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
#: The modes in which a COMMIT waits for the standby.
SAFE = ("remote_write", "on", "remote_apply")


@dataclass
class Failover:
    mode: str
    storms: Storms
    #: Whether ``check --database default`` warned that acknowledged outcomes may be lost.
    warned: bool

    @property
    def is_as_expected(self):
        """A control that loses and doubles nothing shows nothing."""
        is_safe = self.storms.is_safe
        return self.storms.is_whole and is_safe == (self.mode in SAFE) == (not self.warned)


@contextmanager
def running_pair(mode):
    """A primary, its standby, and the network between them."""
    with ExitStack() as stack:
        primary = stack.enter_context(server_to_stop())
        network = stack.enter_context(Proxy(primary.url))
        socket = Path(parse_qs(urlsplit(network.url).query)["host"][0], embedded.SOCKET_NAME)
        for path in (socket.parent, socket):
            path.chmod(0o777)  # the standby may run as another user
        standby = stack.enter_context(running_standby(network.url, STANDBY))
        with closing(Database(primary.url)) as database:
            streaming = "SELECT sync_state FROM pg_stat_replication WHERE application_name = %s AND state = 'streaming'"
            wait_until(lambda: database.query(streaming, STANDBY), "the standby streams")
            primary.configure(**MODES[mode])
            if "synchronous_standby_names" in MODES[mode]:
                wait_until(lambda: database.query(streaming, STANDBY) == [("quorum",)], "the standby is synchronous")
        yield primary, standby, network
        with suppress(embedded.EmbeddedPostgresError):
            primary.start()  # frees the shared memory of the killed server


def run_failover(mode):
    with running_pair(mode) as (primary, standby, network):
        warned = warns(primary.url)
        # libpq connects clients to the server that takes writes.
        url = embedded.url_of(primary.directory, standby.directory) + "&target_session_attrs=read-write"
        with storms_on(url) as (storms, provider):
            storms.get_further()
            network.holding = True
            with closing(Database(primary.url)) as database:
                # Until clients have enough outcomes that the standby lacks, or each pair waits for the standby.
                storms.get_further(otherwise=lambda: database.count(WAITING) >= sum(PAIRS.values()))
            primary.kill()
            network.cut()  # data in transit is lost
            standby.promote()
            storms.get_further()
            storms.settle(standby.url, provider)
        return Failover(mode, storms, warned)


def warns(url):
    """Whether the package's check of the database warns."""
    check = [sys.executable, "manage.py", "check", "--database", "default"]
    settings = {**environment(url), "DJANGO_SETTINGS_MODULE": "testproject.settings"}
    output = subprocess.run(check, cwd=ROOT, env=settings, check=True, capture_output=True, text=True).stderr
    return "idempotency.W015" in output or "idempotency.W013" in output
