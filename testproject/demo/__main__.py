"""``python -m testproject.demo CHARGES ORDERS``: one run, whose verdict is the exit code.

``manage.py demo`` starts it. It uses the database of ``DATABASE_URL``, or else a PostgreSQL that lives as long as it.
"""

import os
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import django
from rich.console import Console

from testproject.embedded import EmbeddedPostgresError, embedded_postgres
from testproject.harness.marks import Marks
from testproject.harness.processes import ProcessError
from testproject.harness.redis import RedisMissingError, running_redis


def main() -> int:
    charges, orders = map(int, sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as a Ctrl-C, so that the server is stopped
    for name in [name for name in os.environ if name.startswith("CELERY_")]:
        del os.environ[name]  # it would lead the demo's messages to another broker than its own
    console = Console(highlight=False)
    try:
        with ExitStack() as stack:
            if not os.environ.get("DATABASE_URL"):
                os.environ["DATABASE_URL"] = stack.enter_context(embedded_postgres())
            return run(charges, orders, console, stack)
    except (EmbeddedPostgresError, ProcessError) as error:
        console.print(f"FAILED. {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted. The server and its workers are stopped.")
        return 130


def run(charges: int, orders: int, console: Console, stack: ExitStack) -> int:
    """Bring everything up, let the storms rage, and judge them."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="demo-")))
    redis = None
    console.print(
        f"[bold]Sending {charges:,} charges over a bad network to a server that is being killed.[/]\n"
        "Clients cut their connection or send duplicates at the same instant, and retry under one Idempotency-Key "
        "until they know the outcome, while worker processes die by SIGKILL. The same storm meets an endpoint without "
        "protection. Effects are counted in the database."
    )
    try:
        redis = stack.enter_context(running_redis())
        console.print(
            f"Then {orders:,} orders, whose messages go through the outbox, a relay, a real Redis and a Celery "
            "worker, all of them killed on the way. Beside it, the handler sends plain tasks."
        )
    except RedisMissingError as error:
        console.print(f"The storm of messages is left out. {error}", markup=False)
    marks = Marks(directory / "marks")
    marks.directory.mkdir()
    # Read by the settings, here and in the processes. Like a production server, but with a short lease. With the
    # default of a minute the demo would mostly wait.
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
        "DEBUG": "false",
        "ALLOWED_HOSTS": "127.0.0.1",
        "IDEMPOTENCY_LEASE_SECONDS": "2",
        "DEMO_MARKS": str(marks.directory),
        **({} if redis is None else {"BROKER_URL": redis.url}),
    }
    django.setup()
    from .show import Show

    show = Show(console, marks, directory)
    show.play("charges", charges)
    if redis is not None:
        show.play("orders", orders, redis)
    if show.problems:
        console.print("\n[bold red]FAILED.[/]")
        for line in show.problems:
            console.print(f"  - {line}", markup=False)
        return 1
    console.print(
        f"\n[bold green]PASSED.[/] {marks.count('died.*')} killed workers lost or doubled nothing that was protected, "
        "and every client was told the one outcome."
    )
    for line in show.summary:
        console.print(f"  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
