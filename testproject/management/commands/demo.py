"""``manage.py demo``: find or start a database, then let the storm run in a process that was started for it."""

import importlib.util
import os
import signal
import subprocess
import sys
from argparse import ArgumentParser
from contextlib import ExitStack
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from testproject.demo.charges import FEWEST
from testproject.embedded import EmbeddedPostgresError, embedded_postgres

NEEDED = ("celery", "gunicorn", "httpx", "psycopg", "redis", "rich", "tenacity")
STOP_LIMIT = 30.0  # seconds; the storm ends its server within a third of it


class Command(BaseCommand):
    help = (
        "Send charges over a bad network to a real server whose workers are being killed, count their effects in the "
        "database, and show the same storm on an unprotected endpoint. Then orders, whose messages go through outbox, "
        "Redis and a Celery worker, all of them killed on the way. Exits with 1 unless everything took effect exactly "
        "once. Starts a PostgreSQL of its own, and deletes it, unless a database is given."
    )
    # The storm's own process checks and migrates the database that is used; this one doesn't touch any.
    requires_system_checks: tuple[str, ...] = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        for name, default in (("operations", 500), ("orders", 40)):
            help_text = f"logical ones for each of the two endpoints; at least {FEWEST} (default: %(default)s)"
            parser.add_argument(f"--{name}", type=int, default=default, help=help_text)
        parser.add_argument(
            "--database",
            metavar="URL",
            help="the database to use, which is migrated and keeps the charges (default: $DATABASE_URL, or else a "
            "PostgreSQL that lives as long as the demo)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if missing := [package for package in NEEDED if importlib.util.find_spec(package) is None]:
            raise CommandError(
                f"The demo needs {', '.join(missing)}. Install its dependency group:\n"
                "    python -m pip install -e . --group demo"
            )
        counts = [options["operations"], options["orders"]]
        if min(counts) < FEWEST:
            raise CommandError(f"Fewer than {FEWEST} would not meet every trouble.")
        with ExitStack() as stack:
            url = options["database"] or os.environ.get("DATABASE_URL")
            try:
                url = url or stack.enter_context(embedded_postgres())
            except EmbeddedPostgresError as error:
                raise CommandError(str(error)) from error
            code = self._run_storm(counts, url)
        if code:
            # A negative one is the signal that ended the process, which a shell tells as 128 and more.
            sys.exit(code if code > 0 else 128 - code)

    def _run_storm(self, counts: list[int], url: str) -> int:
        path = os.pathsep.join(filter(None, [str(settings.BASE_DIR), os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [sys.executable, "-m", "testproject.demo", *map(str, counts)],
            env={**os.environ, "DATABASE_URL": url, "PYTHONPATH": path},
        )
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            return process.wait()
        except KeyboardInterrupt:
            # A Ctrl-C in a terminal has reached the storm, too; it stops its server and says so.
            try:
                return process.wait(STOP_LIMIT)
            except subprocess.TimeoutExpired:
                return 130
        finally:
            signal.signal(signal.SIGTERM, before)
            if process.poll() is None:
                process.kill()
                process.wait()
