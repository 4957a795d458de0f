"""Counts events of records: first in this process's memory, then in a table that all processes share.

After a response was sent, and at most every ``FLUSH_EVERY`` seconds, the process adds its new counts to
``IdempotencyCounter``. This is called a flush. A process also flushes after a sweep and when its interpreter ends.

A failure here makes a number inexact and has no other effect. If a process is killed, its counts since the last flush
are lost. If the database refuses the counts, they stay in memory. If it commits and the connection breaks before its
answer arrives, they are added twice.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
from collections import Counter
from typing import Any, Final

from django.core.signals import request_finished
from django.db import connections
from django.db.models import QuerySet

from ... import signals
from ...store import records_database
from ...store.statement_timeout import connection_as_found
from .adding import write_counts
from .models import IdempotencyCounter

logger: Final = logging.getLogger("idempotency")

#: Seconds. Each flush is one short transaction, so a hundred processes cost the database ten transactions a second.
FLUSH_EVERY = 10.0

#: How long, in seconds, a reader waits for a flush in another thread. A reader that doesn't wait may count twice the
#: counts that are being written.
FLUSH_WAIT = 1.0

#: Counts of single hours are kept for this long: the last week, and the same day of the week before.
HOURS_KEPT = 8 * 24

#: Counts the purges that found nothing more to delete, under the operation "".
PURGE_ENDED = "purge_ended"

#: (operation, event) → how often. The operation is "" if a person resolved a record of an operation that this process
#: doesn't know.
Counts = Counter[tuple[str, str]]


class Counters:
    """The counts that this process has not written yet, and how they are written. A forked child starts at zero."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the counts in memory. The table is not changed."""
        # Make new locks, because after a fork the old ones may be held by a thread that the child doesn't have.
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
        # The sender is None for a request of Django's test client. Don't flush after those: the test may count
        # statements, and ten seconds later its database may be gone or replaced by another one.
        if sender is not None:
            self.flush_if_due()

    def flush_if_due(self) -> None:
        """Flush, unless the last flush was less than ``FLUSH_EVERY`` seconds ago. May be called often."""
        if self._pending and time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Write the counts since the last flush to the table. Never raises.

        Does nothing in three cases: in an open transaction, because the counters' rows would stay locked until that
        transaction ends (in a TestCase one is always open); in the thread of an event loop, because it would block the
        loop; and while another thread flushes.
        """
        if not self._pending or _runs_event_loop() or not self._flushing.acquire(blocking=False):
            return
        try:
            self._flush()
        except Exception:  # no caller could do anything about it: the response is sent, or the interpreter is ending
            if not self._failing:
                logger.warning("The counters could not be written; they are kept for the next time", exc_info=True)
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
        # When the interpreter ends, the test database in which a test counted may be gone, and the alias may stand for
        # another database again. The counts must not be added to that one.
        if self._database in {None, _database(using)}:
            with connection_as_found(using):
                write_counts(using, counts, this_hour())
        # If the process is killed before the COMMIT, nothing was added and the counts are lost. If it is killed after
        # the COMMIT, they were added once. If an exception interrupts the flush, for example one that the handler of an
        # operating system signal raises, the counts are kept for the next flush.
        with self._lock:
            self._pending -= counts
            self._database = _database(using) if self._pending else None
        self._failing = False

    def read(self, using: str) -> dict[str, Counter[str]]:
        """Read the counts of all processes from the table, plus those that this process has not written yet.

        :returns: for each operation, how often each event happened.
        :raises DatabaseError: the database refuses, as in the other readings.
        """
        read: dict[str, Counter[str]] = {}
        for _, operation, event, count in self._rows(using, 0):
            if event in signals.EVENTS:
                read.setdefault(operation, Counter())[event] += count
        return read

    def read_hours(self, using: str, since: int) -> dict[int, dict[str, Counter[str]]]:
        """Read the same for single hours, in hours since 1970, from ``since`` on.

        A count belongs to the hour in which it was written, which is up to ten seconds after the event.
        """
        read: dict[int, dict[str, Counter[str]]] = {}
        for hour, operation, event, count in self._rows(using, max(1, since)):
            read.setdefault(hour or this_hour(), {}).setdefault(operation, Counter())[event] += count
        return read

    def read_last_purge(self, using: str) -> int | None:
        """Read the hour in which a purge last found nothing more to delete, in hours since 1970; None if none did."""
        ended = _hours(using).filter(operation="", event=PURGE_ENDED)
        return ended.order_by("-hour").values_list("hour", flat=True).first()

    def read_first_hour(self, using: str) -> int | None:
        """Read the first hour of which counts are kept, in hours since 1970. None if there are no counts."""
        return _hours(using).order_by("hour").values_list("hour", flat=True).first()

    def _rows(self, using: str, since: int) -> list[tuple[int, str, str, int]]:
        """The rows of the sums, if ``since`` is 0, or of the hours since then. Counts in memory have the hour 0."""
        rows = IdempotencyCounter.objects.using(using)
        rows = rows.filter(hour__gte=since) if since else rows.filter(hour=0)
        waited = self._flushing.acquire(timeout=FLUSH_WAIT)
        try:
            counted = list(rows.values_list("hour", "operation", "event", "total"))
            if using == records_database():
                with self._lock:
                    counted += [(0, operation, event, count) for (operation, event), count in self._pending.items()]
        finally:
            if waited:
                self._flushing.release()
        return counted


def this_hour() -> int:
    """The current hour, in hours since 1970, by this process's clock. A few minutes don't matter here."""
    return int(time.time() // 3600)


def _hours(using: str) -> QuerySet[IdempotencyCounter]:
    return IdempotencyCounter.objects.using(using).filter(hour__gt=0)


def note_end_of_purge(using: str) -> None:
    """Count that a purge has found nothing more to delete, and delete the counts of hours that are long ago.

    Does nothing in an open transaction, which is that of a TestCase, for the reason that ``Counters.flush`` has.

    :raises DatabaseError: the database refuses.
    """
    if _in_transaction(using):
        return
    write_counts(using, Counter({("", PURGE_ENDED): 1}), this_hour())
    _hours(using).filter(hour__lt=this_hour() - HOURS_KEPT).delete()


def _database(using: str) -> object:
    """The database that an alias stands for at the moment. Test runners replace it for a while."""
    return connections[using].settings_dict["NAME"]


def _in_transaction(using: str) -> bool:
    """Whether a transaction is open in this thread. Inside of ``atomic``, too, autocommit is off."""
    connection = connections[using]
    return connection.connection is not None and not connection.get_autocommit()


def _runs_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


counters: Final = Counters()
