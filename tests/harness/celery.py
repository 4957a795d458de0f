"""A Celery worker of the sample project, as a process of its own on the tests' database."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from django.conf import settings

from testproject.harness.processes import Daemon
from tests.database import processes


@contextmanager
def running_worker(
    broker: str,
    directory: Path,
    *options: str,
    is_ready: Callable[[], bool] = lambda: True,
    **environment: str,
) -> Iterator[Daemon]:
    """Run a worker for as long as the block. Its log is in the directory."""
    seen = {
        **processes.environment(),
        **environment,
        "PYTHONPATH": str(settings.BASE_DIR),
        "BROKER_URL": broker,
        "CELERY_BROKER_URL": broker,
        "CELERY_SKIP_CHECKS": "true",  # they load every view, and have been run
    }
    command = [sys.executable, "-m", "celery", "--app", "testproject", "worker", "--loglevel", "INFO", *options]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat", "--hostname", f"tests{id(command)}@%h"]
    with Daemon("worker", command, directory, environment=seen, is_ready=is_ready) as worker:
        yield worker
