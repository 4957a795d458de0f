"""Count events, read the counts written, and make the database refuse writes."""

import itertools
from collections import Counter

from django.db import OperationalError

from idempotency import Operation, signals
from idempotency.contrib.dashboard.models import IdempotencyCounter
from idempotency.identity.scope import Scope
from tests.database.statements import before_statement

operation = Operation.declare("tests.counters")
SCOPE = Scope("1", operation.name, "k")
CLAIMED = (operation.name, "claimed")


def count(times=1, event=signals.claimed, of=operation):
    for _ in range(times):
        signals.send(event, of, SCOPE, 1)


def written():
    """The totals. The hourly counts must add up to them: a process started by the test may write in the next hour."""
    sums, of_hours = Counter(), Counter()
    for row in IdempotencyCounter.objects.all():
        (of_hours if row.hour else sums)[row.operation, row.event] += row.total
    assert of_hours == sums
    return sums


def refusing(error, times=1000):
    """Let the database refuse the next ``times`` statements on counters."""
    errors = itertools.repeat(error, times)

    def refuse():
        for each in errors:
            raise each()

    return before_statement("idempotency_dashboard_counter", refuse)


def unreachable():
    return OperationalError("no route to host")
