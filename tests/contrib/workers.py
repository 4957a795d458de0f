"""Celery workers as processes of their own, on the tests' database and a real broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TypeVar

import redis
from django.conf import settings
from typing_extensions import Self

from tests.contrib.brokers import Broker, RedisServer
from tests.database import processes

#: Seconds, for what takes a second or two on a machine that has nothing else to do.
PATIENCE = 30


def connect(url: str) -> redis.Redis:
    """A client that waits for as long as it is told to."""
    return redis.Redis.from_url(url, decode_responses=True, socket_timeout=None)


W = TypeVar("W", bound="Worker")


class Worker:
    """One worker with its pool, for as long as the block runs."""

    def __init__(self, broker: Broker, line: RedisServer, log: Path, *, concurrency: int = 2) -> None:
        self.log = log
        self._line = connect(line.url)
        self._environment = {
            **processes.environment(),
            "BROKER_URL": broker.url,
            "CELERY_BROKER_URL": broker.url,
            "TESTS_REDIS_URL": line.url,
            "CELERY_SKIP_CHECKS": "true",  # they load every view, and have been run
        }
        self._command = [sys.executable, "-m", "celery", "--app", "testproject", "worker"]
        self._command += ["--include", "tests.contrib.worker_tasks"]
        self._command += ["--concurrency", str(concurrency), "--loglevel", "INFO", "--hostname", f"tests{id(self)}@%h"]
        self._command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=settings.BASE_DIR,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that the group is the worker and its pool
            )
        deadline = time.monotonic() + PATIENCE
        while self._line.blpop(["ready"], timeout=0.2) is None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"The worker did not start:\n{self.log.read_text()[-4000:]}")
        return self

    def __exit__(self, *error: object) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()  # it ends when its tasks have
        try:
            process.wait(PATIENCE)
        finally:
            self.kill()

    def kill(self) -> None:
        """The whole group, as when the machine goes."""
        assert self._process is not None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            self._process.wait(PATIENCE)

    @property
    def pid(self) -> int:
        """Of the main process."""
        assert self._process is not None
        return self._process.pid
