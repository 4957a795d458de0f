"""Counting, a look at what was written of it, and a database that refuses to write."""

from contextlib import contextmanager

from django.db import OperationalError, connection

from idempotency import Operation, signals
from idempotency.contrib.dashboard.models import IdempotencyCounter
from idempotency.identity.scope import Scope

operation = Operation("tests.counters")
SCOPE = Scope("1", operation.name, "k")
CLAIMED = (operation.name, "claimed")


def count(times=1, event=signals.claimed, of=operation):
    for _ in range(times):
        signals.send(event, of, SCOPE, 1)


def written():
    """The sums. Those of this hour are the same."""
    sums = {(row.operation, row.event): row.total for row in IdempotencyCounter.objects.filter(hour=0)}
    assert {(row.operation, row.event): row.total for row in IdempotencyCounter.objects.filter(hour__gt=0)} == sums
    return sums


@contextmanager
def refusing(error, times=1000):
    """Let the database refuse the next ``times`` statements on counters."""
    left = times

    def refuse(execute, sql, params, many, context):
        nonlocal left
        if "idempotency_dashboard_counter" in sql and left:
            left -= 1
            raise error()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(refuse):
        yield


def unreachable():
    return OperationalError("no route to host")
