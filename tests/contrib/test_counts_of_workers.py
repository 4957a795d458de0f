"""A worker has no requests after which to write its counts: it writes them after its tasks, and when it ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery.signals import task_postrun, worker_process_shutdown

import idempotency.contrib.celery  # noqa: F401 - connects its handlers
from idempotency import signals
from idempotency.identity.scope import Scope
from idempotency.models import IdempotencyCounter
from idempotency.operation import Operation, registry
from idempotency.upkeep import counters as counters_module
from idempotency.upkeep.counters import counters

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _one_claim_is_counted(db: None) -> Iterator[None]:
    counters.reset()
    IdempotencyCounter.objects.all().delete()  # which a worker of an earlier test may have written as it ended
    operation = Operation("tests.worker_counts")
    signals.send(signals.claimed, operation, Scope("1", operation.name, "k"), 1)
    yield
    registry.discard(operation.name)
    counters.reset()


class Request:
    def __init__(self, is_eager: bool) -> None:
        self.is_eager = is_eager


class Task:
    """As much of a task as the signal's receivers look at."""

    def __init__(self, is_eager: bool = False) -> None:
        self.request = Request(is_eager)


def written() -> list[int]:
    return list(IdempotencyCounter.objects.values_list("total", flat=True))


def test_a_worker_writes_its_counts_after_a_task_when_they_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task()
    task_postrun.send(sender=task)
    assert written() == []  # not due yet: ten seconds are not over
    monkeypatch.setattr(counters_module, "FLUSH_EVERY", 0.0)
    counters.reset()
    signals.send(signals.claimed, registry.get("tests.worker_counts"), Scope("1", "tests.worker_counts", "k"), 1)
    task_postrun.send(sender=task)
    assert written() == [1]


def test_an_eager_task_leaves_them_to_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters_module, "FLUSH_EVERY", 0.0)
    counters.reset()
    signals.send(signals.claimed, registry.get("tests.worker_counts"), Scope("1", "tests.worker_counts", "k"), 1)
    task_postrun.send(sender=Task(is_eager=True))
    assert written() == []


def test_a_child_that_ends_writes_what_is_left() -> None:
    worker_process_shutdown.send(sender=None)
    assert written() == [1]
