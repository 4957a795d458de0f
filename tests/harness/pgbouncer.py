"""A private PgBouncer in transaction mode. A system package provides the program."""

import os
from contextlib import closing, contextmanager
from urllib.parse import parse_qs, unquote, urlsplit

import psycopg

from testproject.embedded import UNPRIVILEGED_USER
from testproject.harness.processes import Daemon, answers, free_port, short_directory
from tests.harness.servers import find_program

#: Server sessions. A process frozen inside its transaction keeps one, so there are more sessions than cells at a time,
#: but fewer than these cells have clients.
POOL_SIZE = 16

CONFIGURATION = """\
[databases]
* = {server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
admin_users = {user}
pool_mode = transaction
default_pool_size = {size}
max_client_conn = 1000
server_login_retry = 1
"""


class Pooler:
    """``url`` is what Django connects to. For libpq, leave out its query."""

    def __init__(self, url, port, process):
        self._process = process
        parts = urlsplit(url)
        self._place = f"{parts.username or 'postgres'}@127.0.0.1:{port}"
        self.url = f"postgres://{self._place}{parts.path}?DISABLE_SERVER_SIDE_CURSORS=true"

    def show(self, what):
        """One of PgBouncer's status tables, such as ``clients``."""
        rows = psycopg.rows.dict_row
        console = f"postgres://{self._place}/pgbouncer"
        # The console takes only simple queries, and refuses BEGIN.
        with closing(psycopg.connect(console, autocommit=True, row_factory=rows)) as connection:
            return psycopg.ClientCursor(connection).execute(f"SHOW {what}").fetchall()

    def restart(self):
        """Kill it, and start it again."""
        self._process.kill()
        self._process.start()


@contextmanager
def running_pgbouncer(url, size=POOL_SIZE):
    """Run a PgBouncer in front of the server of ``url``, with ``size`` server sessions for each database."""
    parts, port = urlsplit(url), free_port()
    server = {
        "host": parse_qs(parts.query)["host"][0] if parts.hostname is None else parts.hostname,
        "port": parts.port or 5432,
        "user": parts.username or "postgres",
        "password": unquote(parts.password or ""),
    }
    with short_directory("pgbouncer-") as directory:
        configuration = directory / "pgbouncer.ini"
        line = " ".join(f"{name}='{value}'" for name, value in server.items() if value)
        configuration.write_text(CONFIGURATION.format(server=line, port=port, user=server["user"], size=size))
        # It refuses to run as root.
        user = ["-u", UNPRIVILEGED_USER] if os.geteuid() == 0 else []
        command = [find_program("pgbouncer", "pgbouncer"), *user, str(configuration)]
        with Daemon("pgbouncer", command, directory, is_ready=lambda: answers(("127.0.0.1", port))) as process:
            yield Pooler(url, port, process)
