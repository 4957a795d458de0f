"""``manage.py demo``: the options of the demo, which takes the place of the command."""

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
        "Send charges over a bad network to a real server whose workers are being killed, count their effects in the "
        "database, and show the same storm on an unprotected endpoint. Then orders, whose messages go through outbox, "
        "Redis and a Celery worker, all of them killed on the way. Exits with 1 unless everything took effect exactly "
        "once. Starts a PostgreSQL of its own, and deletes it, unless a database is given."
    )
    # The demo checks and migrates the database that it uses.
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
        path = os.pathsep.join(filter(None, [str(settings.BASE_DIR), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        if options["database"]:
            environment["DATABASE_URL"] = options["database"]
        # Settings are read once, at the start. The demo has others, so it is another program.
        os.execve(sys.executable, [sys.executable, "-m", "testproject.demo", *map(str, counts)], environment)  # noqa: S606
