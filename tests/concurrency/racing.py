"""Threads that start together or are held, and whose errors surface; trouble; and a look at what was left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import pytest
from django.db import OperationalError, connections
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


def elsewhere(call: Callable[[], T]) -> T:
    """What it returns in another thread, and so on other connections."""
    return race([call])[0]


def in_background(pool: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T]:
    return pool.submit(_call, call)


@contextmanager
def held(call: Callable[[], T], gate: Gate) -> Iterator[Future[T]]:
    """The call stands at its gate in the background of the block, and is done when the block has ended."""
    with ThreadPoolExecutor(1) as pool:
        future = in_background(pool, call)
        gate.wait_until_reached()
        try:
            yield future
        finally:
            gate.open()
        future.result(PATIENCE)  # its errors are the test's


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


# What handlers and stores do in trouble, and how an answer names it


def fail(request: Any = None) -> None:
    raise RuntimeError("on purpose")


def unreachable(*args: Any, **kwargs: Any) -> Any:
    raise OperationalError("server closed the connection unexpectedly")


@contextmanager
def failing_database(owner: Any, *names: str) -> Iterator[None]:
    """In the block these functions find the database out of reach."""
    with pytest.MonkeyPatch.context() as patched:
        for name in names:
            patched.setattr(owner, name, unreachable)
        yield


def problem(answer: Any) -> tuple[int, str]:
    """Status and code of an answer that is a problem."""
    assert answer["Content-Type"] == "application/problem+json"
    return answer.status_code, str(answer.json()["code"])


UNAVAILABLE = (503, "idempotency_unavailable")
IN_PROGRESS = (409, "idempotency_in_progress")
UNKNOWN = (409, "idempotency_outcome_unknown")


# What they left


def record(key: str = "k") -> IdempotencyRecord:
    return IdempotencyRecord.objects.get(idempotency_key=key)


def state() -> tuple[str, list[str]]:
    """The one record's status, and the effects."""
    return record().status, effects()


def is_replay(answer: Any, of: Any) -> bool:
    """Whether an answer is the recorded one of another answer."""
    return (answer.status_code, answer.content, answer.get("Idempotency-Replayed")) == (201, of.content, "true")


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
