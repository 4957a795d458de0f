"""What the cells of a run share: a database of their own, the zygote that forks workers, and two providers.

Nothing here goes through Django: what a cell asserts is read by a connection that knows nothing of the package.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

from idempotency.scope import Scope
from testproject.provider import Effect, read_ledger, running_provider
from tests.crash.channel import PATIENCE, Channel

ROOT = Path(__file__).resolve().parents[2]
#: A moment long gone. A lease that ended then has ended by anybody's clock.
LONG_AGO = "2000-01-01 00:00:00"
POLL = 0.01


class ImpossibleError(Exception):
    """The harness could not do what a cell asks for. A failure of the cell, never a pass."""


def wait_until(condition: Callable[[], Any], what: str, limit: float = PATIENCE) -> Any:
    """Poll what no event tells of, such as another process's state."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if found := condition():
            return found
        # Between two bounded looks at another process; what is waited for is looked at, not timed.
        time.sleep(POLL)
    raise ImpossibleError(f"{what}: not within {limit:g} s")


def wait_until_stopped(pid: int) -> None:
    stat = Path(f"/proc/{pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "a process stops")


class Worker:
    """The cell's end of one worker process."""

    def __init__(self, pid: int, channel: Channel) -> None:
        self.pid = pid
        self.channel = channel
        #: Whether it was last seen waiting at a place, so that its process id is surely its own.
        self.held = False

    def next_event(self) -> dict[str, Any] | None:
        """What the worker tells next; None when it has died."""
        try:
            event: dict[str, Any] = self.channel.wait()
        except (EOFError, ConnectionResetError):
            self.held = False
            return None
        except TimeoutError as error:
            raise ImpossibleError("a worker says nothing") from error
        self.held = event["event"] == "reached"
        return event

    def go(self) -> None:
        self.held = False
        self.channel.tell(event="go")

    def wait_until_stopped(self) -> None:
        wait_until_stopped(self.pid)

    def end(self) -> None:
        """Let go of the worker: if it is still held at a place it dies, frozen or not."""
        self.channel.close()
        if self.held:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Only for a worker that is known to be alive: one that is held at a place."""
        os.kill(self.pid, number)


Forked = TypeVar("Forked")


class Zygote(Generic[Forked]):
    """The harness's end of a zygote. Safe to use from several threads.

    :param module: what its forks run.
    :param end: makes the harness's end of a fork, of its process id and its channel.
    :param log: takes what they write; by default that goes where the harness's own output goes.
    """

    def __init__(
        self,
        module: str,
        environment: Mapping[str, str],
        end: Callable[[int, Channel], Forked],
        log: Path | None = None,
    ) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there, contextlib.nullcontext() if log is None else log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.crash.zygote", str(there.fileno()), module],
                cwd=ROOT,
                env=environment,
                pass_fds=(there.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._end = end
        here.settimeout(PATIENCE)
        self._control = here
        self._lock = threading.Lock()
        if here.recv(16) != b"ready":
            raise ImpossibleError("the zygote did not start")

    def fork(self, **spec: Any) -> Forked:
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(self._control, [json.dumps(spec).encode()], [theirs.fileno()])
            pid = int(self._control.recv(16))
        return self._end(pid, Channel(ours))

    def close(self) -> None:
        self._control.close()
        self._process.wait(PATIENCE)


def environment(url: str) -> dict[str, str]:
    """What the processes of this harness see."""
    return {**os.environ, "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "tests.crash.settings"}


def zygote_of_workers(url: str) -> Zygote[Worker]:
    return Zygote("tests.crash.worker", environment(url), Worker)


class Observer:
    """One cell's view of the database, and its hand on the clock: a lease is ended by back-dating it."""

    def __init__(self, arena: Arena, path: Path | None) -> None:
        self.path = path
        if path is None:
            import psycopg

            self._connection: Any = psycopg.connect(arena.url, autocommit=True)
        else:
            self._connection = sqlite3.connect(path, isolation_level=None, timeout=PATIENCE)
        self._mark = "%s" if path is None else "?"

    def close(self) -> None:
        self._connection.close()

    def query(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(statement.replace("%s", self._mark), parameters)
        return [] if cursor.description is None else list(cursor.fetchall())

    def record(self, operation: str, key: str = "%") -> dict[str, Any] | None:
        rows = self.query(
            "SELECT id, status, attempt, response_status, response_body, lease_expires_at FROM idempotency_record "
            "WHERE operation = %s AND idempotency_key LIKE %s",
            operation,
            key,
        )
        if not rows:
            return None
        names = ("id", "status", "attempt", "response_status", "response_body", "lease_expires_at")
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
        if self.path is not None:
            self._connection.execute("PRAGMA busy_timeout = 500")
            try:
                self.query(statement, *parameters)
            except sqlite3.OperationalError as error:
                if "locked" not in str(error):
                    raise
            return
        import psycopg

        try:
            with self._connection.transaction():
                self._connection.execute("SET LOCAL lock_timeout = '500ms'")
                self.query(statement, *parameters)
        except psycopg.errors.LockNotAvailable:
            pass

    def lease_is_over(self, operation: str) -> bool:
        now = "statement_timestamp()" if self.path is None else "strftime('%Y-%m-%d %H:%M:%f', 'now')"
        return bool(
            self.query(
                f"SELECT 1 FROM idempotency_record WHERE operation = %s AND lease_expires_at <= {now}", operation
            )
        )

    def writes(self, label: str) -> list[str]:
        """Which attempts have left an effect in the database."""
        rows = self.query("SELECT recipient FROM testproject_transfer WHERE label = %s ORDER BY id", label)
        return [row[0] for row in rows]

    def steps(self, record_id: int) -> int:
        return int(self.query("SELECT count(*) FROM idempotency_step WHERE record_id = %s", record_id)[0][0])

    def wait_until_gone(self, operation: str) -> None:
        """Wait until the sessions of an operation's workers are gone, as they are soon after a worker was killed."""
        if self.path is None:
            wait_until(
                lambda: not self.query("SELECT 1 FROM pg_stat_activity WHERE application_name = %s", operation[:63]),
                "the sessions of a killed process end",
            )

    def end_session(self, session: int) -> None:
        self.query("SELECT pg_terminate_backend(%s)", session)
        wait_until(lambda: not self.query("SELECT 1 FROM pg_stat_activity WHERE pid = %s", session), "a session ends")


class Arena:
    def __init__(
        self, url: str, zygote: Zygote[Worker], template: Path | None, ledgers: dict[bool, tuple[Path, str]]
    ) -> None:
        self.url = url
        self.zygote = zygote
        self.template = template
        self._ledgers = ledgers

    @property
    def database(self) -> str:
        return "postgres" if self.template is None else "sqlite"

    @contextmanager
    def observer(self, name: str) -> Iterator[Observer]:
        """A view of the database; on SQLite a file of the cell's own, because a frozen writer locks all of one."""
        path = None
        if self.template is not None:
            path = self.template.with_name(f"{name}.sqlite3")
            shutil.copyfile(self.template, path)
        observer = Observer(self, path)
        try:
            yield observer
        finally:
            observer.close()
            if path is not None:
                for file in path.parent.glob(f"{path.name}*"):
                    file.unlink(missing_ok=True)

    def provider(self, *, deduplicate: bool) -> str:
        return self._ledgers[deduplicate][1]

    def payouts(self, operation: str, key: str, *, deduplicate: bool) -> list[Effect]:
        """What the provider has paid for an operation, by its ledger."""
        derived = str(Scope("1", operation, key).derive_key("payout"))
        return [effect for effect in read_ledger(self._ledgers[deduplicate][0]) if effect.key == derived]


@contextmanager
def arena(database: str, url: str | None = None) -> Iterator[Arena]:
    """Bring up what the cells share. ``url`` is that of a PostgreSQL to make a database in; without it, one is run."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crash-")))
        template = None
        if database == "sqlite":
            template = directory / "template.sqlite3"
            own = f"sqlite:///{template}"
        else:
            if url is None:
                from testproject.embedded import embedded_postgres

                url = stack.enter_context(embedded_postgres())
            own = stack.enter_context(own_database(url))
        migrate(own)
        ledgers = {}
        for deduplicate in (True, False):
            ledger = directory / f"ledger-{'once' if deduplicate else 'always'}.jsonl"
            ledgers[deduplicate] = (
                ledger,
                stack.enter_context(running_provider(ledger, deduplicate=deduplicate)),
            )
        zygote = zygote_of_workers(own)
        stack.callback(zygote.close)
        yield Arena(own, zygote, template, ledgers)


@contextmanager
def own_database(url: str) -> Iterator[str]:
    """A new database on the server of ``url``."""
    import psycopg

    name = f"crash_{uuid4().hex[:12]}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    try:
        yield urlunsplit(urlsplit(url)._replace(path=f"/{name}"))
    finally:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


PREPARE = """
import django
django.setup()
from django.core.management import call_command
from django.contrib.auth.models import User
call_command("migrate", verbosity=0)
User.objects.create(pk=1, username="alice")
"""


def migrate(url: str) -> None:
    """The tables, and the one user whom every effect belongs to."""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PREPARE],
        cwd=ROOT,
        env=environment(url),
        check=True,
    )
