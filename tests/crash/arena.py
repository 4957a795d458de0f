"""What the cells of a run share, and one cell's view of the database.

Nothing here goes through Django: what a cell asserts is read by a connection that knows nothing of the package.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg

from idempotency.identity.scope import Scope
from testproject.provider import Effect, Provider
from tests.harness.world import LONG_AGO, Database, World, world
from tests.harness.zygote import wait_until


class Observer(Database):
    """One cell's view of the database, and its hand on the clock: a lease is ended by back-dating it."""

    def __init__(self, url: str, path: Path | None) -> None:
        super().__init__(url)
        #: The cell's own file, on SQLite.
        self.path = path
        self.query("PRAGMA busy_timeout = 500" if self.is_sqlite else "SET lock_timeout = '500ms'")

    def record(self, operation: str, key: str = "%") -> dict[str, Any] | None:
        names = ("id", "status", "attempt", "response_status", "response_body", "lease_expires_at")
        rows = self.query(
            f"SELECT {', '.join(names)} FROM idempotency_record WHERE operation = %s AND idempotency_key LIKE %s",
            operation,
            key,
        )
        if not rows:
            return None
        record = dict(zip(names, rows[0], strict=True))
        if isinstance(record["response_body"], str):  # drivers that parse a json column have parsed it
            record["response_body"] = json.loads(record["response_body"])
        record["lease_expires_at"] = str(record["lease_expires_at"])
        return record

    def end_lease(self, operation: str, key: str = "%") -> None:
        self._patiently(
            "UPDATE idempotency_record SET lease_expires_at = %s "
            "WHERE operation = %s AND idempotency_key LIKE %s AND status = 'in_progress'",
            LONG_AGO,
            operation,
            key,
        )

    def end_retention(self, operation: str) -> None:
        self._patiently("UPDATE idempotency_record SET expires_at = %s WHERE operation = %s", LONG_AGO, operation)

    def _patiently(self, statement: str, *parameters: Any) -> None:
        """Not for longer than a worker waits, should a frozen one hold the row: its lease is over then anyway."""
        try:
            self.query(statement, *parameters)
        except psycopg.errors.LockNotAvailable:
            pass
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise

    def lease_is_over(self, operation: str) -> bool:
        now = "strftime('%Y-%m-%d %H:%M:%f', 'now')" if self.is_sqlite else "statement_timestamp()"
        return bool(
            self.query(
                f"SELECT 1 FROM idempotency_record WHERE operation = %s AND lease_expires_at <= {now}", operation
            )
        )

    def writes(self, label: str) -> list[str]:
        """Which attempts have left an effect in the database."""
        rows = self.query("SELECT recipient FROM testproject_transfer WHERE label = %s ORDER BY id", label)
        return [row[0] for row in rows]

    def wait_until_gone(self, operation: str) -> None:
        """Wait until the sessions of an operation's workers are gone, as they are soon after a worker was killed."""
        if not self.is_sqlite:
            sessions = "SELECT 1 FROM pg_stat_activity WHERE application_name = %s"
            wait_until(lambda: not self.query(sessions, operation[:63]), "the sessions of a killed process end")

    def end_session(self, session: int) -> None:
        self.query("SELECT pg_terminate_backend(%s)", session)
        wait_until(lambda: not self.query("SELECT 1 FROM pg_stat_activity WHERE pid = %s", session), "a session ends")


class Arena:
    def __init__(self, shared: World) -> None:
        self.url = shared.url
        self.zygote = shared.zygote
        self._providers = shared.providers
        self._directory = shared.directory

    @property
    def database(self) -> str:
        return "sqlite" if self.url.startswith("sqlite") else "postgres"

    @contextmanager
    def observer(self, name: str) -> Iterator[Observer]:
        """A view of the database; on SQLite a file of the cell's own, because a frozen writer locks all of one."""
        if self.database == "postgres":
            with closing(Observer(self.url, None)) as observer:
                yield observer
            return
        path = self._directory / f"{name}.sqlite3"
        shutil.copyfile(self._directory / "template.sqlite3", path)
        try:
            with closing(Observer(f"sqlite:///{path}", path)) as observer:
                yield observer
        finally:
            for file in path.parent.glob(f"{path.name}*"):
                file.unlink(missing_ok=True)

    def provider(self, *, deduplicate: bool) -> Provider:
        return self._providers[deduplicate]

    def payouts(self, operation: str, key: str, *, deduplicate: bool) -> list[Effect]:
        """What the provider has paid for an operation, by its ledger."""
        derived = str(Scope("1", operation, key).derive_key("payout"))
        return [effect for effect in self._providers[deduplicate].effects() if effect.key == derived]


@contextmanager
def arena(url: str | None = None) -> Iterator[Arena]:
    """Bring up what the cells share; ``url`` as for ``world``."""
    with world("tests.crash.worker", url) as shared:
        yield Arena(shared)
