"""A worker has no requests after which to write its counts: it writes them after its tasks, and when it ends."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from celery.signals import task_postrun, worker_process_shutdown

import idempotency.contrib.celery  # noqa: F401 - connects its handlers
from idempotency.upkeep.counters import counters
from tests.database.counters.counting import CLAIMED, count, written

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize(
    ("due", "is_eager", "writes"),
    [(False, False, False), (True, False, True), (True, True, False)],
    ids=["not due yet", "due", "eager, and so left to its request"],
)
def test_a_worker_writes_its_counts_after_a_task_when_they_are_due(due: bool, is_eager: bool, writes: bool) -> None:
    count()
    if due:
        counters._due = 0.0
    task_postrun.send(sender=Mock(**{"request.is_eager": is_eager}))
    assert written() == ({CLAIMED: 1} if writes else {})


def test_a_child_that_ends_writes_what_is_left() -> None:
    count()
    worker_process_shutdown.send(sender=None)
    assert written() == {CLAIMED: 1}
