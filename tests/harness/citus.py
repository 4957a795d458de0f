"""A private Citus cluster for a run: a coordinator and two workers on this machine, over Unix sockets.

It needs a PostgreSQL with the Citus extension, identified by its ``bin`` directory.
"""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psycopg

from testproject.embedded import embedded_postgres

PARAMETERS = {
    "shared_preload_libraries": "citus",
    "citus.enable_statistics_collection": "off",  # it would call home
    "max_prepared_transactions": "200",  # for commits on more than one server
    "max_connections": "300",
    "citus.recover_2pc_interval": "1s",  # the default of a minute is longer than a test waits for a record
}


@dataclass(frozen=True)
class Cluster:
    """The URLs of the servers' first databases."""

    coordinator: str
    workers: list[str]
    #: The programs of the servers.
    binaries: Path

    def url_of(self, database):
        return _in(self.coordinator, f"/{database}")

    def spread(self, url):
        """Distribute a database of the coordinator over the cluster, and return its URL."""
        database = urlsplit(url).path
        for worker in self.workers:
            with psycopg.connect(worker, autocommit=True) as server:
                server.execute(f"CREATE DATABASE {database[1:]}")
        places = [_in(server, database) for server in (*self.workers, self.coordinator)]
        for place in places:
            with psycopg.connect(place, autocommit=True) as connection:
                connection.execute("CREATE EXTENSION citus")
                # The name by which a server reaches itself.
                connection.execute(f"ALTER SYSTEM SET citus.local_hostname = '{host_of(place)}'")
                connection.execute("SELECT pg_reload_conf()")
        with psycopg.connect(places[-1], autocommit=True) as coordinator:
            coordinator.execute("SELECT citus_set_coordinator_host(%s)", (host_of(places[-1]),))
            for place in places[:-1]:
                coordinator.execute("SELECT citus_add_node(%s, 5432)", (host_of(place),))
        return url


@contextmanager
def running_citus(binaries, workers=2):
    with ExitStack() as stack:
        servers = [stack.enter_context(embedded_postgres(PARAMETERS, binaries)) for _ in range(workers + 1)]
        yield Cluster(servers[0], servers[1:], binaries)


def _in(server, database):
    return urlsplit(server)._replace(path=database).geturl()


def host_of(url):
    """The directory of a server's socket and data."""
    return parse_qs(urlsplit(url).query)["host"][0]
