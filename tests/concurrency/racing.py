"""Threads that start together and whose errors surface, and a look at what they left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

from django.db import connections
from django.db.models import F

from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.records import HOUR, from_now

T = TypeVar("T")

#: A bound for whatever waits in a test: long enough for a busy machine, short enough that a deadlock is reported.
PATIENCE = 60


def race(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Call all at once, each in a thread of its own with its own connections; the results in the calls' order."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], T]) -> T:
        start.wait(PATIENCE)
        return _call(call)

    with ThreadPoolExecutor(max_workers=len(calls)) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(run, call) for call in calls]]


def in_background(pool: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T]:
    return pool.submit(_call, call)


def _call(call: Callable[[], T]) -> T:
    try:
        return call()
    finally:
        connections.close_all()


class Gate:
    """Where a handler stops until the test lets it go on."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._open = threading.Event()

    def pass_through(self) -> None:
        self._reached.set()
        assert self._open.wait(PATIENCE), "nobody opened the gate"

    def wait_until_reached(self) -> None:
        assert self._reached.wait(PATIENCE), "nobody reached the gate"

    def open(self) -> None:
        self._open.set()


def record(key: str = "k") -> IdempotencyRecord:
    return IdempotencyRecord.objects.get(idempotency_key=key)


def effects() -> list[str]:
    return sorted(Transfer.objects.values_list("label", flat=True))


def end_lease(key: str = "k") -> None:
    """Move the database's clock past the lease, by back-dating the record."""
    moved = IdempotencyRecord.objects.filter(idempotency_key=key).update(
        lease_expires_at=F("lease_expires_at") - timedelta(hours=1)
    )
    assert moved == 1


def end_retention() -> None:
    IdempotencyRecord.objects.update(expires_at=from_now(-HOUR))


def abandon() -> None:
    """Leave the record and the effects as a kill between the claim's commit and the business commit does."""
    Transfer.objects.all().delete()
    IdempotencyRecord.objects.update(
        status=Status.IN_PROGRESS,
        lease_expires_at=from_now(HOUR),
        completed_at=None,
        response_status=None,
        response_headers=None,
        response_body=None,
    )
