"""``manage.py demo``: parses the options, and replaces its process with the demo."""

import importlib.util
import os
import sys
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from testproject.demo.charges import FEWEST

NEEDED = ("celery", "gunicorn", "httpx", "psycopg", "redis", "rich")


class Command(BaseCommand):
    help = (
        "Send charges over a bad network to a real server whose workers are being killed, and the same requests to an "
        "unprotected endpoint. Then send orders, whose messages go through the outbox, Redis and a Celery worker, all "
        "of which are killed. Effects are counted in the database. Exits with 1 unless every protected operation took "
        "effect exactly once. Uses a temporary PostgreSQL, unless a database is given."
    )
    # The demo may use another database. Its migrate command runs the checks.
    requires_system_checks: tuple[str, ...] = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        for name, default in (("operations", 500), ("orders", 40)):
            help_text = f"number for each of the two endpoints; at least {FEWEST} (default: %(default)s)"
            parser.add_argument(f"--{name}", type=int, default=default, help=help_text)
        parser.add_argument(
            "--database",
            metavar="URL",
            help="the database, which is migrated and keeps the charges (default: $DATABASE_URL, or else a temporary "
            "PostgreSQL)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if missing := [package for package in NEEDED if importlib.util.find_spec(package) is None]:
            raise CommandError(
                f"The demo needs {', '.join(missing)}. Install its dependency group:\n"
                "    python -m pip install -e . --group demo"
            )
        counts = [options["operations"], options["orders"]]
        if min(counts) < FEWEST:
            raise CommandError(f"Fewer than {FEWEST} would not cover every kind of trouble.")
        path = os.pathsep.join(filter(None, [str(settings.BASE_DIR), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        if options["database"]:
            environment["DATABASE_URL"] = options["database"]
        # The demo needs other settings, which are only read at startup, so it replaces this process.
        os.execve(sys.executable, [sys.executable, "-m", "testproject.demo", *map(str, counts)], environment)  # noqa: S606
