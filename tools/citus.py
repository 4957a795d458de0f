"""``python -m tools.citus PART``: run tests on Citus, with a coordinator and two workers.

``CITUS_BINARIES`` is the ``bin`` directory of a PostgreSQL with the extension; by default, the one that
``tests/servers.sh`` builds. The servers are temporary and listen on Unix sockets. The parts are ``checks``
(``tests/on_citus.py``); ``suite``, the tests that may depend on the database, except for those marked ``except_citus``;
``crashes``, the crash matrix; and ``deliveries``, every delivery fault. Other arguments are passed to pytest,
``tools.crashes`` or ``tools.deliveries``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psycopg
import pytest

from testproject.embedded import BINARIES_VARIABLE
from tests.docs.pages import blocks
from tests.harness import world
from tests.harness.citus import Cluster, running_citus
from tests.harness.postgres import Server

#: Tests that may depend on the database, without tests of pure functions and tests that kill processes.
SUITE = [
    *("-m", "not once", "tests/database", "tests/concurrency", "tests/http", "tests/contrib"),
    *("tests/test_orders.py", "tests/test_payouts.py", "tests/test_sample_project.py"),
]

#: Replaces the statement of ``tests.conftest``, which skips tables without pages: on the coordinator, no distributed
#: table has any.
EMPTY = """
DO $$
DECLARE
    each regclass;
BEGIN
    FOREACH each IN ARRAY '{{{tables}}}'::regclass[] LOOP
        EXECUTE 'DELETE FROM ' || each;
    END LOOP;
END $$
"""

#: Adds to Citus' metadata the tables that the sample project's operations write to.
MAKE_KNOWN = """
DO $$
DECLARE
    each regclass;
BEGIN
    FOR each IN SELECT oid FROM pg_class WHERE relname ~ '^(auth|testproject)_' AND relkind = 'r' LOOP
        IF NOT EXISTS (SELECT FROM pg_dist_partition WHERE logicalrelid = each) THEN
            PERFORM citus_add_local_table_to_metadata(each, cascade_via_foreign_keys => true);
        END IF;
    END LOOP;
END $$
"""


def distribute(url: str) -> None:
    """Distribute the package's tables as documented, and add the sample project's to Citus' metadata."""
    (statements,) = blocks("how-to/distribute-over-citus.md", "postgresql")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statements)  # type: ignore[arg-type]
        connection.execute(MAKE_KNOWN)


class OnCitus:
    """A pytest plugin that distributes the test database over the cluster."""

    def __init__(self, running: Cluster) -> None:
        self.running = running

    @pytest.fixture
    def cluster(self) -> Cluster:
        return self.running

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        elsewhere = {"except_citus", "whole_table"}
        left_out = [item for item in items if any(mark.name in elsewhere for mark in item.iter_markers())]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]

    def pytest_collection_finish(self) -> None:
        from tests import conftest  # pytest has to import it first

        conftest.EMPTY_AT_ONCE = EMPTY

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        from django.db.backends.postgresql.creation import DatabaseCreation as Creation

        create_empty, create, cluster = Creation._execute_create_test_db, Creation.create_test_db, self.running

        def create_and_spread(creation: Any, cursor: Any, parameters: Any, keepdb: bool = False) -> None:
            create_empty(creation, cursor, parameters, keepdb)
            cluster.spread(cluster.url_of(parameters["dbname"].strip('"')))

        def create_and_distribute(creation: Any, *args: Any, **options: Any) -> str:
            name: str = create(creation, *args, **options)
            distribute(cluster.url_of(name))
            return name

        Creation._execute_create_test_db = create_and_spread
        Creation.create_test_db = create_and_distribute
        Creation._destroy_test_db = lambda *args: None  # the servers are deleted


def suite(cluster: Cluster, arguments: Sequence[str]) -> int:
    return int(pytest.main(list(arguments), plugins=[OnCitus(cluster)]))


@contextmanager
def spread_worlds(cluster: Cluster) -> Iterator[None]:
    """Distribute the tables of the harness' worlds over the cluster."""
    own_database, migrate = world.own_database, world.migrate

    @contextmanager
    def own_spread_database(url: str) -> Iterator[str]:
        with own_database(url) as database:
            cluster.spread(database)
            yield database

    def migrate_and_distribute(url: str) -> None:
        migrate(url)
        distribute(url)

    with (
        patch.object(world, "own_database", own_spread_database),
        patch.object(world, "migrate", migrate_and_distribute),
    ):
        yield


class ServersInTurn:
    """The servers of a cluster, which are restarted in turn."""

    def __init__(self, cluster: Cluster, url: str) -> None:
        self.url = url
        self._servers = [Server(place) for place in (cluster.coordinator, *cluster.workers)]
        self._turns = cycle(self._servers)

    def restart(self) -> None:
        next(self._turns).restart()

    def stop_being_durable(self) -> None:
        for server in self._servers:
            server.stop_being_durable()


def crashes(cluster: Cluster, arguments: Sequence[str]) -> int:
    from tools import crashes as crash

    @contextmanager
    def servers_to_stop() -> Iterator[ServersInTurn]:
        with world.own_database(cluster.coordinator) as url:
            world.migrate(url)
            yield ServersInTurn(cluster, url)

    with spread_worlds(cluster), patch.object(crash, "server_to_stop", servers_to_stop):
        return crash.main(arguments)


def deliveries(cluster: Cluster, arguments: Sequence[str]) -> int:
    from tools.deliveries import main as deliver

    with spread_worlds(cluster):
        return deliver(arguments)


#: The function that runs each part.
PARTS: dict[str, Callable[[Cluster, Sequence[str]], int]] = {
    "checks": lambda cluster, rest: suite(cluster, rest or ["tests/on_citus.py"]),
    "suite": lambda cluster, rest: suite(cluster, rest or SUITE),
    "crashes": crashes,
    "deliveries": deliveries,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.citus", description=__doc__)
    parser.add_argument("part", choices=sorted(PARTS))
    options, rest = parser.parse_known_args()
    binaries = Path(os.environ.get("CITUS_BINARIES", "/opt/citus/lib/postgresql/15/bin"))
    with running_citus(binaries) as cluster:
        os.environ |= {"DATABASE_URL": cluster.coordinator, BINARIES_VARIABLE: str(binaries)}
        return PARTS[options.part](cluster, rest)


if __name__ == "__main__":
    sys.exit(main())
