"""The world that all cells or scripts of a run share: a private database, two providers and a zygote."""

import os
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

from testproject.embedded import embedded_postgres
from testproject.provider import Provider, running_providers
from tests.harness.pgbouncer import Pooler, running_pgbouncer
from tests.harness.zygote import PATIENCE, ROOT, Zygote

#: A moment long past. A lease that ended then is over by every clock.
LONG_AGO = "2000-01-01 00:00:00"

PREPARE = """
import django
django.setup()
from django.core.management import call_command
from django.contrib.auth.models import User
call_command("migrate", verbosity=0)
User.objects.create(pk=1, username="alice")
"""


def vendor_of(url):
    """The kind of a database, as ``--database`` names it."""
    return {"sqlite": "sqlite", "mysql": "mariadb"}.get(urlsplit(url).scheme, "postgres")


class Database:
    """A connection that is independent of the package. Statements mark their parameters with ``%s``."""

    def __init__(self, url):
        self.vendor = vendor_of(url)
        parts = urlsplit(url)
        if self.vendor == "sqlite":
            self.connection = sqlite3.connect(parts.path.removeprefix("/"), isolation_level=None, timeout=PATIENCE)
        elif self.vendor == "mariadb":
            import MySQLdb

            place = {"host": parts.hostname, "port": parts.port, "user": parts.username, "database": parts.path[1:]}
            self.connection = MySQLdb.connect(**place, autocommit=True, init_command="SET time_zone = '+00:00'")
        else:
            import psycopg

            self.connection = psycopg.connect(url, autocommit=True)

    def close(self):
        self.connection.close()

    def query(self, statement, *parameters):
        cursor = self.connection.cursor()
        cursor.execute(statement.replace("%s", "?") if self.vendor == "sqlite" else statement, parameters)
        return [] if cursor.description is None else list(cursor.fetchall())

    def server(self):
        """The name and version family of the server, and of Citus where it is installed."""
        if self.vendor == "sqlite":
            return "SQLite " + ".".join(sqlite3.sqlite_version.split(".")[:2])
        if self.vendor == "mariadb":
            ((version,),) = self.query("SELECT version()")
            return "MariaDB " + ".".join(version.split(".")[:2])
        ((version,),) = self.query("SHOW server_version")
        citus = self.query("SELECT extversion FROM pg_extension WHERE extname = 'citus'")
        return f"PostgreSQL {version.split('.')[0]}" + "".join(f", Citus {found}" for (found,) in citus)

    def transfers(self, prefix, table="transfer"):
        """The number of rows of each label with this prefix. Each row is an effect in the database."""
        statement = f"SELECT label, count(*) FROM testproject_{table} WHERE label LIKE %s GROUP BY label"
        return Counter(dict(self.query(statement, f"{prefix}-%")))

    def count(self, statement, *parameters):
        return int(self.query(statement, *parameters)[0][0])


def server_of(url):
    """``Database.server`` of a URL."""
    with closing(Database(url)) as database:
        return database.server()


@dataclass(frozen=True)
class World:
    url: str
    #: The kind of the database: what ``vendor_of()`` returns, or "citus".
    database: str
    directory: Path
    zygote: Zygote
    #: One that deduplicates by key (True), and one that pays for each call (False).
    providers: dict[bool, Provider]
    #: The output of the forks.
    log: Path
    #: The server that the forks connect to instead of the database, if any.
    pooler: Pooler | None = None


def environment(url):
    """The environment of processes, with the run's database and without a broker for other purposes.

    Their coverage is not measured, because it would slow them down and they end without writing it.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CELERY_", "COVERAGE_"))}
    return {**inherited, "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "tests.harness.settings"}


@contextmanager
def world(module, url=None, *, pooled=False):
    """Bring up what a run shares.

    :param module: the module that the zygote's forks run.
    :param url: of a server on which to create a database, or "sqlite:". By default, a PostgreSQL is started.
    :param pooled: put a PgBouncer between the forks and the PostgreSQL.
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="harness-")))
        own = stack.enter_context(own_database(url or stack.enter_context(embedded_postgres())))
        migrate(own)
        providers = stack.enter_context(running_providers(directory))
        log = directory / "processes.log"
        pooler = stack.enter_context(running_pgbouncer(own)) if pooled else None
        zygote = stack.enter_context(closing(Zygote(module, environment(pooler.url if pooler else own), log)))
        yield World(own, _database_of(own), directory, zygote, providers, log, pooler)


def _database_of(url):
    with closing(Database(url)) as database:
        has_citus = "SELECT FROM pg_extension WHERE extname = 'citus'"
        return "citus" if database.vendor == "postgres" and database.query(has_citus) else database.vendor


@contextmanager
def own_database(url):
    """A new database on the server of ``url``, or in a file."""
    if url.startswith("sqlite"):
        with tempfile.TemporaryDirectory(prefix="harness-") as directory:
            yield f"sqlite:///{directory}/db.sqlite3"
        return
    name = f"harness_{uuid4().hex[:12]}"
    with closing(Database(url)) as server:
        server.query(f"CREATE DATABASE {name}")
    try:
        yield urlsplit(url)._replace(path=f"/{name}").geturl()
    finally:
        with closing(Database(url)) as server:
            server.query(f"DROP DATABASE {name}{' WITH (FORCE)' if server.vendor == 'postgres' else ''}")


def migrate(url):
    """Create the tables, and the user who owns every effect."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", PREPARE], cwd=ROOT, env=environment(url), check=True)
