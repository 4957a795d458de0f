"""``python -m testproject.demo CHARGES ORDERS``: one run of the demo, whose exit code is its verdict.

``manage.py demo`` starts it. It uses the database of ``DATABASE_URL``, or else a temporary PostgreSQL.
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
from testproject.provider.process import running_provider


def main() -> int:
    charges, orders = map(int, sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, so that the server is stopped
    for name in [name for name in os.environ if name.startswith("CELERY_")]:
        del os.environ[name]  # they could send the demo's messages to another broker
    console = Console(highlight=False)
    try:
        with ExitStack() as stack:
            if not os.environ.get("DATABASE_URL"):
                os.environ["DATABASE_URL"] = stack.enter_context(embedded_postgres())
            return run(charges, orders, console, stack)
    except (EmbeddedPostgresError, ProcessError, RedisMissingError) as error:
        console.print(f"FAILED. {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted. The server and its workers are stopped.")
        return 130


def run(charges: int, orders: int, console: Console, stack: ExitStack) -> int:
    """Start everything, run the storms, and print the verdict."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="demo-")))
    console.print(
        f"[bold]Sending {charges:,} charges over a bad network to a server that is being killed.[/]\n"
        "Clients drop their connection or send duplicates at the same instant, and retry with one Idempotency-Key "
        "until they know the outcome. Meanwhile, worker processes are killed with SIGKILL. An unprotected endpoint "
        "gets the same requests. Effects are counted in the database.\n"
        "Then payments follow, which call a provider before they write. Their control only leaves begin() out.\n"
        f"Then {orders:,} orders follow, whose messages go through the outbox, a relay, a real Redis and a Celery "
        "worker, all of which are killed. The unprotected handler sends ordinary tasks."
    )
    provider = stack.enter_context(running_provider(directory / "ledger.jsonl", deduplicate=True))
    redis = stack.enter_context(running_redis())
    marks = Marks(directory / "marks")
    marks.directory.mkdir()
    # Settings for this process and its children. As in production, except for a short lease: with the default of a
    # minute, the demo would mostly wait.
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
        "DEBUG": "false",
        "ALLOWED_HOSTS": "127.0.0.1",
        "IDEMPOTENCY_LEASE_SECONDS": "2",
        "DEMO_MARKS": str(marks.directory),
        "BROKER_URL": redis.url,
        "DEDUPLICATING_PROVIDER_URL": provider.url,
    }
    django.setup()
    from .charges import FEWEST
    from .show import Show

    show = Show(console, marks, directory, provider)
    show.play("charges", charges)
    show.play("payments", max(charges // 10, FEWEST))
    show.play("orders", orders, redis)
    if show.problems:
        console.print("\n[bold red]FAILED.[/]")
        for line in show.problems:
            console.print(f"  - {line}", markup=False)
        return 1
    console.print(
        f"\n[bold green]PASSED.[/] {marks.count('died.*')} workers were killed, but no protected effect was lost or "
        "doubled, and every client got the same outcome."
    )
    for line in show.summary:
        console.print(f"  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
