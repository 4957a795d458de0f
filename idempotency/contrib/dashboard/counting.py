"""Counts events of records: first in this process's memory, then in a table shared by all processes.

A flush adds the new counts to ``IdempotencyCounter``: after a response, at most every ``FLUSH_EVERY`` seconds, after a
sweep, and when the interpreter ends.

A failure only makes a number inexact. A killed process loses its counts since the last flush. If the database refuses
the counts, they stay in memory. If it commits but the connection breaks before the reply, they are added twice.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from itertools import product
from typing import Any, Final

from django.core.signals import request_finished
from django.db import connections
from django.db.models import F, QuerySet

from ... import signals
from ...operate.batches import in_transaction
from ...store import records_database
from ...store.statement_timeout import connection_as_found
from .models import IdempotencyCounter

logger: Final = logging.getLogger("idempotency")

#: Seconds. Each flush is one short transaction, so a hundred processes cause ten transactions a second.
FLUSH_EVERY = 10.0

#: Ample, because another process that adds to the same rows finishes in milliseconds.
STATEMENT_TIMEOUT: Final = timedelta(seconds=5)

#: Hourly counts are kept for this long: the last week, and the same day of the week before.
HOURS_KEPT = 8 * 24

#: By (operation, event). The operation is "" if an operator resolved a record of an operation not declared here.
Counts = Counter[tuple[str, str]]


class Counters:
    """The unwritten counts of this process. A forked child starts at zero."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard the counts in memory. The table is not changed."""
        # New locks: after a fork, the old ones may be held by a thread that doesn't exist in the child.
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._pending: Counts = Counter()
        self._database: object = None
        self._due = time.monotonic() + FLUSH_EVERY
        self._failing = False

    def connect(self) -> None:
        """Count from now on."""
        signals.connect_events("counters", lambda operation, event, attempt: self.count(operation, event))
        request_finished.connect(self._request_finished, weak=False, dispatch_uid="idempotency.counters")
        os.register_at_fork(after_in_child=self.reset)
        atexit.register(self.flush)

    def count(self, operation: str, event: str) -> None:
        if self._database is None:
            self._database = _database(records_database())
        with self._lock:
            self._pending[operation, event] += 1

    def _request_finished(self, sender: object, **arguments: Any) -> None:
        # The sender is None for requests from Django's test client. Don't flush: the test may count statements, and ten
        # seconds later its database may be gone or replaced.
        if sender is not None:
            self.flush_if_due()

    def flush_if_due(self) -> None:
        """Flush, unless the last flush was less than ``FLUSH_EVERY`` seconds ago. May be called often."""
        if self._pending and time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Write the counts since the last flush to the table. Never raises.

        Does nothing in an open transaction, as in a TestCase, because the counters' rows would stay locked until it
        ends; in the thread of an event loop, which it would block; and while another thread flushes.
        """
        if not self._pending or _runs_event_loop() or not self._flushing.acquire(blocking=False):
            return
        try:
            self._flush()
        except Exception:  # no caller could handle it: the response is sent, or the interpreter is ending
            if not self._failing:
                logger.warning("The counters could not be written and are kept for the next flush", exc_info=True)
            self._failing = True
        finally:
            self._flushing.release()

    def _flush(self) -> None:
        using = records_database()
        if _in_transaction(using):
            return
        self._due = time.monotonic() + FLUSH_EVERY
        with self._lock:
            counts = self._pending.copy()
        # When the interpreter ends, the test database may be gone, and the alias may refer to another database, which
        # must not get the counts.
        if self._database in {None, _database(using)}:
            with connection_as_found(using):
                write_counts(using, counts, this_hour())
        # If the process is killed before the COMMIT, the counts are lost; after the COMMIT, they were added once. If an
        # exception interrupts the flush, for example from a signal handler, they are kept for the next flush.
        with self._lock:
            self._pending -= counts
            self._database = _database(using) if self._pending else None
        self._failing = False

    def read(self, using: str) -> dict[str, Counter[str]]:
        """Read the counts that all processes have written, by operation and event.

        :raises DatabaseError: the database refuses, as in the other methods that read.
        """
        return _read(IdempotencyCounter.objects.using(using).filter(hour=0, event__in=list(signals.EVENTS))).get(0, {})

    def read_hours(self, using: str, since: int) -> dict[int, dict[str, Counter[str]]]:
        """Read the counts by hour, in hours since 1970, starting at ``since``.

        A count belongs to the hour in which it was written, which is up to ten seconds after the event.
        """
        return _read(_hours(using).filter(hour__gte=since))


def this_hour() -> int:
    """The current hour in hours since 1970, by this process's clock, which is exact enough here."""
    return int(time.time() // 3600)


def _hours(using: str) -> QuerySet[IdempotencyCounter]:
    return IdempotencyCounter.objects.using(using).filter(hour__gt=0)


def _read(counters: QuerySet[IdempotencyCounter]) -> dict[int, dict[str, Counter[str]]]:
    read: dict[int, dict[str, Counter[str]]] = {}
    for hour, operation, event, total in counters.values_list("hour", "operation", "event", "total"):
        read.setdefault(hour, {}).setdefault(operation, Counter())[event] = total
    return read


def write_counts(using: str, counts: Mapping[tuple[str, str], int], hour: int) -> None:
    """Add to two counters of each (operation, event): the hour's counter, and the sum, which has the hour 0.

    The first counts of an hour delete the hours past ``HOURS_KEPT``.

    The COMMIT need not wait for the disk: statistics may lose their last counts if the server crashes.

    :raises DatabaseError: the database refuses: under REPEATABLE READ because another process flushes, under InnoDB
        because another process inserts a new counter.
    :raises RuntimeError: a transaction is open.
    """
    in_transaction(using, lambda _: _add(using, counts, hour), statement_timeout=STATEMENT_TIMEOUT, wait_for_disk=False)


def _add(using: str, counts: Mapping[tuple[str, str], int], hour: int) -> None:
    counters = IdempotencyCounter.objects.using(using)
    # All processes lock the rows in the same order, so that they can't deadlock.
    for place, ((operation, event), count) in product((0, hour), sorted(counts.items())):
        one = {"hour": place, "operation": operation, "event": event}
        counter = counters.filter(**one)
        if not counter.update(total=F("total") + count):
            # Two processes may get here at the same time. One creates the counter, and both add to it.
            counters.bulk_create([IdempotencyCounter(**one)], ignore_conflicts=True)
            counter.update(total=F("total") + count)
            _hours(using).filter(hour__lt=hour - HOURS_KEPT).delete()


def _database(using: str) -> object:
    """The database that an alias currently refers to. Test runners replace it."""
    return connections[using].settings_dict["NAME"]


def _in_transaction(using: str) -> bool:
    """Whether a transaction is open in this thread. Autocommit is also off inside ``atomic``."""
    connection = connections[using]
    return connection.connection is not None and not connection.get_autocommit()


def _runs_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


counters: Final = Counters()
