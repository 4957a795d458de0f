"""``python -m testproject.demo``: one run against the database of ``DATABASE_URL``; the exit code is the verdict.

``manage.py demo`` starts it, once there is a database, as a process of its own: settings are read once, at the start.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import django
from rich.console import Console

from testproject.harness.processes import ProcessError
from testproject.harness.redis import Redis, RedisMissingError, running_redis
from testproject.harness.strikes import Marks
from testproject.provider import running_providers
from testproject.provider.client import ProviderFailedError

from .plan import Plan, add_arguments, plan_from

#: What the API allows its provider: shorter than a call is valid, with the lease of two seconds.
PROVIDER_TIMEOUT = 0.5  # seconds

#: What would lead the demo's messages to another broker than its own.
ANOTHER_BROKERS = (
    *("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL"),
    *("RESULT_BACKEND", "CELERY_RESULT_BACKEND", "CELERY_TASK_ALWAYS_EAGER"),
)
INTERRUPTED = 130
PARENT = os.getppid()
interrupted = threading.Event()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m testproject.demo", description=__doc__)
    add_arguments(parser)
    plan = plan_from(vars(parser.parse_args()))
    signal.signal(signal.SIGTERM, interrupt)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    for name in ANOTHER_BROKERS:
        os.environ.pop(name, None)
    console = Console(highlight=False)
    try:
        with ExitStack() as stack:
            return run(plan, console, stack)
    except (ProcessError, ProviderFailedError) as error:
        console.print(f"FAILED. {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted. The server and its workers are stopped.")
        return INTERRUPTED


def interrupt(signum: int, frame: FrameType | None) -> None:
    """A SIGTERM takes the way of a Ctrl-C, so that the server is stopped."""
    interrupted.set()
    raise KeyboardInterrupt


def run(plan: Plan, console: Console, stack: ExitStack) -> int:
    """Bring everything up, let the acts play, and judge them."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="demo-")))
    redis: Redis | None = None
    missing = ""
    try:
        redis = stack.enter_context(running_redis())
    except RedisMissingError as error:
        missing = str(error)
    providers = stack.enter_context(running_providers(directory))
    marks = Marks(directory / "marks")
    marks.directory.mkdir()
    # Read by the settings, here and in the processes. Like a production server, but a killed worker's claim is
    # respected for seconds. With the default lease of a minute the demo would mostly wait.
    os.environ.update(
        DEBUG="false",
        ALLOWED_HOSTS="127.0.0.1",
        IDEMPOTENCY_LEASE_SECONDS=str(plan.lease),
        PROVIDER_URL=providers[False].url,
        DEDUPLICATING_PROVIDER_URL=providers[True].url,
        PROVIDER_TIMEOUT=str(PROVIDER_TIMEOUT),
        DEMO_MARKS=str(marks.directory),
        DEMO_KILL_EVERY=str(plan.kill_every),
        DEMO_WORKERS=str(plan.workers),
        **({} if redis is None else {"BROKER_URL": redis.url}),
    )
    django.setup()
    from .report import Report
    from .show import Show

    return Show(plan, Report(console, plan), marks, providers, redis).run(directory, missing, should_end)


def should_end() -> bool:
    """Whether the demo has been interrupted, or its owner killed and the database with it."""
    return interrupted.is_set() or os.getppid() != PARENT


if __name__ == "__main__":
    sys.exit(main())
