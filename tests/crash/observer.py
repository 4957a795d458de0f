"""One cell's view of the database, limited to its operation. The sessions of its workers have the operation's name.

Nothing here uses Django: assertions read from a connection that is independent of the package.
"""

import json
import shutil
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

from tests.harness.world import LONG_AGO, Database
from tests.harness.zygote import wait_until

#: Limits how long the observer waits for a frozen process's lock, to half a second or a second.
BOUND_WAITING = {
    "sqlite": "PRAGMA busy_timeout = 500",
    "postgres": "SET lock_timeout = '500ms'",
    "mariadb": "SET innodb_lock_wait_timeout = 1",
}
#: The statements that end and find a session.
END_SESSION = {
    "postgres": ("SELECT pg_terminate_backend(%s::int)", "SELECT 1 FROM pg_stat_activity WHERE pid = %s"),
    "mariadb": ("KILL %s", "SELECT 1 FROM information_schema.processlist WHERE id = %s"),
}


class Observer(Database):
    """One cell's view of the database. It ends leases by back-dating them."""

    def __init__(self, url, operation, path=None, pooler=None):
        super().__init__(url)
        self.operation = operation
        #: The cell's own file, on SQLite.
        self.path = path
        self.pooler = pooler
        self.query(BOUND_WAITING[self.vendor])

    def record(self, key="%"):
        names = ("id", "status", "attempt", "response_status", "response_body", "response_reference")
        names += ("lease_expires_at",)
        rows = self.query(
            f"SELECT {', '.join(names)} FROM idempotency_record WHERE operation = %s AND idempotency_key LIKE %s",
            self.operation,
            key,
        )
        if not rows:
            return None
        record = dict(zip(names, rows[0], strict=True))
        if isinstance(record["response_body"], str):  # other drivers have parsed it
            record["response_body"] = json.loads(record["response_body"])
        record["lease_expires_at"] = str(record["lease_expires_at"])
        return record

    def end_lease(self, key="%"):
        live = "operation = %s AND idempotency_key LIKE %s AND status = 'in_progress'"
        self._back_date("lease_expires_at", live, self.operation, key)

    def end_retention(self):
        self._back_date("expires_at", "operation = %s", self.operation)

    def _back_date(self, column, condition, *parameters):
        """Give up on a row that a frozen worker locks, because its lease is over then anyway.

        Rows are selected by id, because MariaDB locks every row that an update reads, and by account, because Citus
        runs no two updates of all shards at once.
        """
        for (record_id,) in self.query(f"SELECT id FROM idempotency_record WHERE {condition}", *parameters):
            update = f"UPDATE idempotency_record SET {column} = %s WHERE account_id = '1' AND id = %s AND {condition}"
            try:
                self.query(update, LONG_AGO, record_id, *parameters)
            except Exception as error:  # each driver has its own class
                if not any(text in str(error).lower() for text in ("is locked", "lock timeout", "lock wait timeout")):
                    raise

    def lease_is_over(self):
        over = "SELECT 1 FROM idempotency_record WHERE operation = %s AND lease_expires_at <= CURRENT_TIMESTAMP"
        return bool(self.query(over, self.operation))

    def writes(self, label):
        """The attempts that have an effect in the database."""
        rows = self.query("SELECT recipient FROM testproject_transfer WHERE label = %s ORDER BY id", label)
        return [row[0] for row in rows]

    def wait_until_gone(self):
        """Wait until the sessions of the operation's workers are gone. They end soon after a worker is killed."""
        if self.vendor != "postgres":  # MariaDB's sessions don't name their operation
            return
        if pooler := self.pooler:
            wait_until(
                lambda: self.operation[:63] not in [client["application_name"] for client in pooler.show("clients")],
                "the pooler detects that a process was killed",
            )
        wait_until(lambda: not self._sessions(), "the sessions of a killed process end")

    def _sessions(self):
        """The sessions of workers, without those that the pooler keeps for another client or for a worker's second
        connection. A session may still execute a statement of a client that is gone."""
        kept = [server["remote_pid"] for server in self.pooler.show("servers")] if self.pooler else []
        of_workers = "SELECT pid FROM pg_stat_activity WHERE application_name = %s AND pid <> ALL(%s::int[])"
        return self.query(of_workers, self.operation[:63], kept)

    def end_session(self, session):
        """End a session of a worker.

        :param session: the id of its server process, or behind a pooler the port of a disconnected client.
        """
        if pooler := self.pooler:
            wait_until(
                lambda: session not in [client["port"] for client in pooler.show("clients")],
                "the pooler detects that a client is gone",
            )
            wait_until(lambda: not self._sessions(), "the server finishes the client's statement")
            return
        end, find = END_SESSION[self.vendor]
        self.query(end, session)
        wait_until(lambda: not self.query(find, session), "a session ends")


@contextmanager
def observing(world, operation):
    """A view of the database. On SQLite each cell has a separate file, because a frozen writer locks a whole file."""
    if world.database != "sqlite":
        with closing(Observer(world.url, operation, pooler=world.pooler)) as observer:
            yield observer
        return
    path = world.directory / f"{operation}.sqlite3"
    shutil.copyfile(urlsplit(world.url).path, path)
    try:
        with closing(Observer(f"sqlite:///{path}", operation, path)) as observer:
            yield observer
    finally:
        for file in path.parent.glob(f"{path.name}*"):
            file.unlink(missing_ok=True)
