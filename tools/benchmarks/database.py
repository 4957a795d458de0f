"""The temporary database of the benchmarks, in an embedded PostgreSQL or on the server of ``DATABASE_URL``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

# After a checkpoint, the first change of each page writes the whole page to the log. An autovacuum occupies a core.
# Both would hit variants at random, so a run has neither.
PARAMETERS = {
    "autovacuum": "off",
    "checkpoint_timeout": "1h",
    "max_connections": "300",
    "max_wal_size": "4GB",
    "shared_buffers": "256MB",
    "track_io_timing": "off",
}

#: ``OPTIONS`` of a connection that plans each statement once, not for every request.
PREPARED = {"server_side_binding": True, "prepare_threshold": 1}


@contextmanager
def scratch_database(options: Mapping[str, Any], parameters: Mapping[str, str] = PARAMETERS) -> Iterator[None]:
    """Set up Django on a new, migrated database, and drop it at the end.

    ``options`` are added to the connection's ``OPTIONS``. The server is the one of ``DATABASE_URL``, whose account must
    be allowed to create databases. Without the variable, an embedded server is started with ``parameters``.
    """
    from testproject.embedded import embedded_postgres

    url = os.environ.get("DATABASE_URL")
    with nullcontext(url) if url else embedded_postgres(parameters) as server:
        os.environ["DATABASE_URL"] = server
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tools.benchmarks.service.settings")

        import django

        django.setup()

        from django.db import connection

        if connection.vendor != "postgresql":
            raise SystemExit("The benchmarks compare statements of PostgreSQL; DATABASE_URL names another database.")
        original = connection.settings_dict["NAME"]
        connection.settings_dict["OPTIONS"].update(options)
        connection.creation.create_test_db(verbosity=0, autoclobber=True)
        try:
            yield
        finally:
            connection.creation.destroy_test_db(original, verbosity=0)
            connection.close()
