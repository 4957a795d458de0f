"""Idempotent tasks in real worker processes, which are killed, at a real broker.

What else becomes of a message is asked one delivery at a time, in this process, by the tests beside this one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from testproject.harness.processes import Daemon
from testproject.harness.redis import Redis
from tests.contrib.consumers import effects, end_leases, record
from tests.contrib.deliveries import DEAD, QUEUE, Inbox
from tests.contrib.worker_tasks import gated, gated_unprotected, poison
from tests.harness.celery import running_worker
from tests.providers import PATIENCE, eventually

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.xdist_group("workers"),
]


@pytest.fixture(scope="module")
def worker(redis_server: Redis, django_db_setup: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    line = redis_server.client()
    with running_worker(
        redis_server.url,
        tmp_path_factory.mktemp("worker"),
        *("--include", "tests.contrib.worker_tasks", "--concurrency", "2"),
        is_ready=lambda: line.blpop(["ready"], timeout=0.2) is not None,
        TESTS_REDIS_SOCKET=str(redis_server.socket),
    ) as running:
        yield running


class Line:
    """To the tasks."""

    def __init__(self, server: Redis) -> None:
        self._redis = server.client()
        self._server = server

    def _next(self, name: str) -> str:
        found = self._redis.blpop([name], timeout=PATIENCE)
        assert found is not None, f"waited for {name!r}"
        return str(found[1])

    def arrived(self, label: str) -> int:
        """The process in which a gated task stands still."""
        return int(self._next(f"arrived:{label}"))

    def go(self, label: str) -> None:
        self._redis.lpush(f"go:{label}", 1)

    def ended(self, task_id: str) -> str:
        """The state in which the next delivery of a message has ended."""
        return self._next(f"ended:{task_id}")

    def runs(self, label: str) -> int:
        return int(self._redis.get(f"runs:{label}") or 0)

    def idle(self) -> bool:
        """Whether every message has been acknowledged."""
        return not self._server.count(QUEUE)


@pytest.fixture
def line(worker: Daemon, redis_server: Redis, inbox: Inbox) -> Iterator[Line]:
    made = Line(redis_server)
    yield made
    assert eventually(made.idle), worker.log.read_text()[-4000:]


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.scenario(7)
def test_a_message_that_is_delivered_twice_has_one_effect_and_the_control_has_two(inbox: Inbox, line: Line) -> None:
    for task in (gated, gated_unprotected):
        for _ in range(2):
            line.go(task.name)
        task_id = inbox.publish(task, task.name)
        assert line.ended(task_id) == "SUCCESS"
        inbox.publish(task, task.name, task_id=task_id)
        assert line.ended(task_id) == "SUCCESS"
    assert effects() == {gated.name: 1, gated_unprotected.name: 2}


@pytest.mark.failure_mode(53)
@pytest.mark.parametrize(("task", "count"), [(gated, 1), (gated_unprotected, 2)], ids=["protected", "control"])
def test_a_worker_that_is_killed_after_its_effect_and_its_message_delivered_again(
    inbox: Inbox, line: Line, task: Any, count: int
) -> None:
    task_id = inbox.publish(task, "a")
    kill(line.arrived("a"))
    if count == 1:
        assert line.ended(task_id) == "IGNORED"  # the lease of the killed one runs
        end_leases()
    line.arrived("a")
    line.go("a")
    assert line.ended(task_id) == "SUCCESS"
    assert effects() == {"a": count}


@pytest.mark.failure_mode(58)
def test_a_message_that_kills_its_worker_each_time_is_dead_lettered_and_its_record_is_free(
    inbox: Inbox, line: Line
) -> None:
    inbox.publish(poison, "a")
    assert eventually(lambda: bool(inbox.messages(DEAD)))
    assert eventually(line.idle)
    assert (line.runs("a"), effects(), record().status) == (2, {}, "recoverable")
    [dead] = inbox.messages(DEAD)
    assert dead["idempotency_dead_letter_reason"] == "2 runs were cut off"
