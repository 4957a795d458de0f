"""Counting, a look at what was written of it, and a database that refuses to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import OperationalError, connection

from idempotency import Operation, signals
from idempotency.contrib.dashboard.models import IdempotencyCounter
from idempotency.identity.scope import Scope

operation = Operation("tests.counters")
SCOPE = Scope("1", operation.name, "k")
CLAIMED = (operation.name, "claimed")


def count(times: int = 1, event: Any = signals.claimed, of: Operation | None = operation) -> None:
    for _ in range(times):
        signals.send(event, of, SCOPE, 1)


def written() -> dict[tuple[str, str], int]:
    """The sums. Those of this hour are the same."""
    sums = {(row.operation, row.event): row.total for row in IdempotencyCounter.objects.filter(hour=0)}
    assert {(row.operation, row.event): row.total for row in IdempotencyCounter.objects.filter(hour__gt=0)} == sums
    return sums


@contextmanager
def refusing(error: Callable[[], BaseException], times: int = 1000) -> Iterator[None]:
    """Let the database refuse the next ``times`` statements on counters."""
    left = times

    def refuse(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        nonlocal left
        if "idempotency_dashboard_counter" in sql and left:
            left -= 1
            raise error()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(refuse):
        yield


def unreachable() -> OperationalError:
    return OperationalError("no route to host")
