"""What the workers run that tests start, beside the sample project's own tasks.

They tell the test where they are, and wait there until they are told to go on, through lists at a Redis.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import redis
from celery import shared_task
from celery.signals import task_postrun, worker_ready

from idempotency.contrib.celery import idempotent_task
from tests.contrib.consumers import LATE, effect
from tests.contrib.deliveries import DEAD

#: Seconds for which a task waits for the test, which by then has failed.
LONGEST = 60

#: Longer than a test takes, so that it runs out when the test says so.
LEASE = timedelta(hours=1)
SHORT_LEASE = timedelta(milliseconds=300)


def line() -> redis.Redis:
    """To the test."""
    return redis.Redis(unix_socket_path=os.environ["TESTS_REDIS_SOCKET"], decode_responses=True)


def meet(label: str) -> None:
    line().lpush(f"arrived:{label}", os.getpid())
    assert line().blpop(f"go:{label}", timeout=LONGEST), "the test has gone"


@worker_ready.connect
def tell_ready(**_: Any) -> None:
    line().lpush("ready", os.getpid())


@task_postrun.connect
def tell_ended(task_id: str, state: str, **_: Any) -> None:
    line().lpush(f"ended:{task_id}", str(state))


@shared_task(name="tests.worker.gated", **LATE)
@idempotent_task("tests.worker.gated", dead_letter=DEAD, lease=LEASE)
def gated(label: str) -> str:
    """Stands still between its effect and its end."""
    effect(label)
    meet(label)
    return f"{label} is done"


@shared_task(name="tests.worker.gated_unprotected", **LATE)
def gated_unprotected(label: str) -> str:
    """The control."""
    effect(label)
    meet(label)
    return f"{label} is done"


@shared_task(name="tests.worker.poison", **LATE)
@idempotent_task("tests.worker.poison", dead_letter=DEAD, lease=SHORT_LEASE, max_attempts=2)
def poison(label: str) -> None:
    """Kills its process, each time."""
    effect(label)
    line().incr(f"runs:{label}")
    os.kill(os.getpid(), signal.SIGKILL)
