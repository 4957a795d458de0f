"""``python -m tests.scale.citus --binaries DIRECTORY``: what holds on Citus, on a coordinator and two workers.

``DIRECTORY`` is the ``bin`` of a PostgreSQL that has the extension Citus. The servers are the run's own and are deleted
at its end. Without further arguments everything runs; with some, pytest gets them, and the rest is left out.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.harness.citus import Cluster, running_citus

#: Tests that ask PostgreSQL what only a table of one server has, each with what it asks for.
NOT_ON_CITUS = {
    "test_x": "",
}

#: In place of what ``tests.conftest`` does: a distributed table takes no room on the coordinator.
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

#: Tables of the sample project that its operations write to, as one shard on the coordinator.
KNOWN_TO_CITUS = """
SELECT citus_add_local_table_to_metadata(oid::regclass, cascade_via_foreign_keys => true)
FROM pg_class
WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace AND relname ~ '^(testproject|auth)'
    AND NOT EXISTS (SELECT FROM pg_dist_partition WHERE logicalrelid = pg_class.oid)
"""


def distribute(using: str = "default") -> None:
    from django.core.management import call_command

    call_command("idempotency_distribute", database=using, verbosity=0, stderr=io.StringIO())


class OnCitus:
    """A plugin of pytest that spreads the test database over the cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def pytest_collection_finish(self) -> None:
        from tests import conftest

        conftest.EMPTY_AT_ONCE = EMPTY

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        from django.db.backends.postgresql.creation import DatabaseCreation

        cluster, create = self.cluster, DatabaseCreation.create_test_db
        create_empty = DatabaseCreation._execute_create_test_db

        def create_and_spread(creation: Any, cursor: Any, parameters: Any, keepdb: bool = False) -> None:
            create_empty(creation, cursor, parameters, keepdb)
            cluster.spread(urlsplit(cluster.coordinator)._replace(path="/" + parameters["dbname"].strip('"')).geturl())

        def create_and_distribute(creation: Any, *args: Any, **kwargs: Any) -> Any:
            name = create(creation, *args, **kwargs)
            distribute(creation.connection.alias)
            return name

        DatabaseCreation._execute_create_test_db = create_and_spread
        DatabaseCreation.create_test_db = create_and_distribute
        DatabaseCreation._destroy_test_db = lambda *args: None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scale.citus", description=__doc__)
    parser.add_argument("--binaries", type=Path, required=True)
    options, arguments = parser.parse_known_args()
    with running_citus(options.binaries) as cluster:
        os.environ["DATABASE_URL"] = cluster.coordinator
        return pytest.main(arguments, plugins=[OnCitus(cluster)])


if __name__ == "__main__":
    sys.exit(main())
