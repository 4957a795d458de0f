"""``python -m tools.benchmarks.ways``: compare the ways to connect to a database, with one protected view.

The ways are a connection for each thread, Django's pool, PgBouncer in transaction mode, and MariaDB. Several client
processes call the view in several threads each, without HTTP, so that they only share the database. A round is a block
of first executions over each way, and then a block of replays. The exit code is 1 if a request got another answer than
201, or if a session kept a setting of an earlier transaction.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from testproject.embedded import embedded_postgres
from tests.harness.mariadb import running_mariadb
from tests.harness.pgbouncer import running_pgbouncer
from tools.benchmarks.database import PARAMETERS
from tools.benchmarks.instruments import relative, turns
from tools.benchmarks.report import Table, times

PROCESSES = 3
THREADS = 4
#: The pooler's server sessions and the pools' connections. There are more threads, so that they are shared.
SESSIONS = 8
ROUNDS = 5
WAIT = 300  # seconds

#: Counts the settings of a session that differ from the server's.
CHANGED = {
    "postgresql": """
        SELECT count(*) FROM pg_settings WHERE setting <> reset_val AND name IN
            ('lock_timeout', 'statement_timeout', 'idle_in_transaction_session_timeout', 'synchronous_commit')
    """,
    "mysql": "SELECT @@session.innodb_lock_wait_timeout <> @@global.innodb_lock_wait_timeout",
}
CHECKOUTS = 100


@dataclass
class Way:
    """A way to connect to a database, and its clients' measurements."""

    name: str
    url: str
    pool: int = 0  # connections in each process's pool; 0 for no pool
    clients: list[subprocess.Popen[str]] = field(default_factory=list)
    rates: dict[str, list[float]] = field(default_factory=lambda: {"first": [], "replay": []})  # requests a second
    answers: Counter[str] = field(default_factory=Counter)  # by status
    left: int = 0  # checkouts with a setting of an earlier transaction

    def start(self) -> None:
        environment = os.environ | {"DATABASE_URL": self.url, "DJANGO_SETTINGS_MODULE": "testproject.settings"}
        command = [sys.executable, "-m", "tools.benchmarks.ways", "--client", str(self.pool)]
        for _ in range(PROCESSES):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.clients.append(subprocess.Popen(command, env=environment, text=True, **pipes))  # type: ignore[call-overload]

    def run(self, what: str, requests: int = 0) -> list[Any]:
        """Run a command in all clients at the same time, and return their results."""
        for client in self.clients:
            client.stdin.write(json.dumps([what, requests]) + "\n")  # type: ignore[union-attr]
            client.stdin.flush()  # type: ignore[union-attr]
        return [json.loads(client.stdout.readline()) for client in self.clients]  # type: ignore[union-attr]

    def measure(self, what: str, requests: int) -> None:
        start = time.monotonic()
        for statuses in self.run(what, requests):
            self.answers.update(statuses)
        self.rates[what].append(PROCESSES * requests / (time.monotonic() - start))

    def stop(self) -> None:
        for client in self.clients:
            client.communicate(timeout=WAIT)


def compare(requests: int, seed: int, progress: Callable[[str], None], ways: Sequence[Way]) -> list[Table]:
    """:param requests: the number for each client in a block."""
    for way in ways:
        way.start()
        way.run("ready")
    for way, counts in turns("ways", ways, ROUNDS, random.Random(seed), progress):
        for what in way.rates:
            way.measure(what, requests)
            if not counts:
                way.rates[what].clear()
    direct = ways[0]
    headings = ("first executions a second", f"× {direct.name}", "replays a second", f"× {direct.name}")
    table = Table("Ways to a database", ("", *headings, "requests", "other answers than 201", "settings left"))
    for way in ways:
        cells: list[str] = []
        for what, rates in way.rates.items():
            cells += [f"{statistics.median(rates):,.0f}", times(relative(rates, direct.rates[what]))]
        other = {status: count for status, count in way.answers.items() if status != "201"}
        errors = ", ".join(f"{count} × {status}" for status, count in sorted(other.items())) or "none"
        way.left = sum(way.run("settings"))
        table.add(way.name, *cells, f"{way.answers.total():,}", errors, f"{way.left} of {PROCESSES * CHECKOUTS:,}")
        way.stop()
    return [table]


@contextmanager
def servers(*, with_mariadb: bool) -> Iterator[list[Way]]:
    with ExitStack() as stack:
        url = stack.enter_context(embedded_postgres(PARAMETERS))
        pooler = stack.enter_context(running_pgbouncer(url, SESSIONS)).url
        ways = [
            Way("a connection for each thread", url),
            Way("Django's pool", url, pool=-(-SESSIONS // PROCESSES)),
            Way("PgBouncer", pooler),
        ]
        if with_mariadb:
            ways.append(Way("MariaDB", stack.enter_context(running_mariadb())))
        yield ways


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.ways", description=__doc__)
    parser.add_argument(
        "--requests", type=int, default=300, help="requests per client and block (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the order of the ways (default: %(default)s)")
    parser.add_argument("--mariadb", action="store_true", help="include MariaDB, which must be installed")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client is not None:
        run_client(arguments.client)
        return 0
    with servers(with_mariadb=arguments.mariadb) as ways:
        for way in {way.url: way for way in ways}.values():
            migrate = [sys.executable, "manage.py", "migrate", "--verbosity=0"]
            subprocess.run(migrate, env=os.environ | {"DATABASE_URL": way.url}, check=True)
        for table in compare(arguments.requests, arguments.seed, partial(print, file=sys.stderr), ways):
            print(table)
        return int(any(way.left or set(way.answers) != {"201"} for way in ways))


# A client


def run_client(pool: int) -> None:
    import django

    django.setup()
    from django.contrib.auth.models import User
    from django.db import close_old_connections, connection
    from django.http import HttpRequest, JsonResponse
    from django.test import RequestFactory

    from idempotency import idempotent
    from testproject.models import Transfer

    if pool:
        connection.settings_dict["CONN_MAX_AGE"] = 0
        connection.settings_dict["OPTIONS"]["pool"] = {"min_size": pool, "max_size": pool}

    @idempotent("benchmarks.transfers")
    def transfer(request: HttpRequest) -> JsonResponse:
        made = Transfer.objects.create(**json.loads(request.body))
        return JsonResponse({"id": made.pk}, status=201)

    user = User.objects.create(username=str(uuid.uuid4()))
    keys: list[str] = []
    factory = RequestFactory()
    body = {"recipient": "acct_1", "amount": 100}

    def request(key: str) -> str:
        headers = {"Idempotency-Key": key}
        made = factory.post("/", {**body, "account_id": user.pk}, content_type="application/json", headers=headers)
        made.user = user
        response = transfer(made)
        close_old_connections()  # as Django does after each request
        return str(response.status_code)

    def settings_left(number: int) -> bool:
        """Whether a new checkout has a setting that differs from the server's."""
        with connection.cursor() as cursor:
            cursor.execute(CHANGED[connection.vendor])
            found = bool(cursor.fetchone()[0])
        connection.close()
        return found

    with ThreadPoolExecutor(THREADS) as threads:
        for line in sys.stdin:
            what, count = json.loads(line)
            answer: Any = None
            if what == "first":
                keys[:] = [str(uuid.uuid4()) for _ in range(count)]
            if what in ("first", "replay"):
                answer = Counter(threads.map(request, keys))
            elif what == "settings":
                answer = sum(threads.map(settings_left, range(CHECKOUTS)))
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.exit(main())
