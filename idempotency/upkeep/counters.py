"""What happens to records, counted: in this process's memory first, and now and then added to a table for all of them.

A request only ever counts in memory. After its response was sent, and at most every ``FLUSH_EVERY`` seconds, a process
adds what it has counted since to ``IdempotencyCounter``, where all processes add up. The same is done after a sweep and
when the interpreter ends, so that commands count too.

What may go wrong costs a number and nothing else. A process that is killed takes with it what it had not written: at
most what it counted in ten seconds, and what it counted since in requests that have not ended. If the database refuses,
the counts stay in memory until it doesn't. If it commits and the connection breaks before it can say so, they are added
twice.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from django.core.signals import request_finished
from django.db import connections, transaction
from django.dispatch import Signal

from .. import signals, sql
from ..models import IdempotencyCounter
from ..operation import Operation
from ..protocol.transactions import alias

logger = logging.getLogger("idempotency")

#: Seconds. Each flush is one short transaction; at this pace a hundred processes cost the database ten a second.
FLUSH_EVERY = 10.0

#: Under REPEATABLE READ each flush of another process, and under InnoDB each new counter, can refuse this one. It
#: happens a few times at most; then the counts are kept for the next time.
MAX_ROUNDS = 5

#: How long, in seconds, a reader waits for a flush in another thread. Without it, what is being written may be missing
#: or counted twice in one look.
READ_PATIENCE = 1.0

#: (operation, event) → how often. The operation is empty where an operator settled a record of one that the process
#: doesn't know.
Counts = dict[tuple[str, str], int]


class Counters:
    """What this process has counted and not written yet, and how it is written. A forked child starts from nothing."""

    #: What is counted, by the name that it has in the table.
    WATCHED: ClassVar[dict[str, Signal]] = {
        "claimed": signals.claimed,
        "taken_over": signals.taken_over,
        "completed": signals.completed,
        "replayed": signals.replayed,
        "conflicted": signals.conflicted,
        "key_reused": signals.key_reused,
        "released": signals.released,
        "lease_lost": signals.lease_lost,
        "recovered": signals.recovered,
        "parked": signals.parked,
    }

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was counted here. What is in the table stays."""
        # New locks: at a fork, a thread that is not there any more may hold the old ones.
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._pending: Counts = {}
        self._writing: Counts = {}
        self._database: object = None
        self._due = time.monotonic() + FLUSH_EVERY
        self._failing = False

    def connect(self) -> None:
        for event, signal in self.WATCHED.items():
            signal.connect(self._receiver(event), weak=False, dispatch_uid=f"idempotency.counters.{event}")
        request_finished.connect(self._request_finished, weak=False, dispatch_uid="idempotency.counters")
        os.register_at_fork(after_in_child=self.reset)
        atexit.register(self.flush)

    def _receiver(self, event: str) -> Callable[..., None]:
        def count(sender: Operation | None, **arguments: Any) -> None:
            key = ("" if sender is None else sender.name, event)
            if self._database is None:
                self._database = _database(alias())
            with self._lock:
                self._pending[key] = self._pending.get(key, 0) + 1

        return count

    def _request_finished(self, sender: object, **arguments: Any) -> None:
        # Django's test clients are no handlers and name none. What they ask for is looked at by somebody who may count
        # statements, and whose database may be gone or another one ten seconds later.
        if sender is not None:
            self.flush_if_due()

    def flush_if_due(self) -> None:
        """``flush``, unless the last one was less than ``FLUSH_EVERY`` seconds ago. For what is called often."""
        if self._pending and time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Add to the table what this process has counted since the last time. Never raises.

        Does nothing where it would be in the way: if a transaction is open, in which the counters' rows would stay
        locked until somebody else ends it (in a TestCase one always is); in the thread of an event loop, which it
        would block; and while another thread is at it.
        """
        if not self._pending or _runs_event_loop() or not self._flushing.acquire(blocking=False):
            return
        try:
            self._flush()
        except Exception:  # of no use to who calls this: a server after its response, an interpreter at its end
            if not self._failing:
                logger.warning("What was counted could not be written yet", exc_info=True)
            self._failing = True
        finally:
            self._flushing.release()

    def _flush(self) -> None:
        using = alias()
        if _in_transaction(using):
            return
        self._due = time.monotonic() + FLUSH_EVERY
        with self._lock:
            counts, self._pending = self._pending, {}
            self._writing, database, self._database = counts, self._database, None
        kept = counts
        try:
            # Tests count in a database that is gone, or isn't the configured one any more, when the interpreter ends.
            # What they counted must not end up in another one.
            if database in {None, _database(using)}:
                with _as_it_was(using):
                    _add(using, counts)
            kept = {}
        finally:
            # Killed before the COMMIT: nothing was added, and what was counted is lost. Killed after it: it was added
            # once. Interrupted, by an exception that a signal's handler raised, say: kept for the next time.
            with self._lock:
                self._writing = {}
                for key, count in kept.items():
                    self._pending[key] = self._pending.get(key, 0) + count
                    self._database = database
        self._failing = False

    def read(self, using: str) -> dict[str, Counter[str]]:
        """What all processes have written, and what this one hasn't written yet: events by operation.

        :raises DatabaseError: as the database does.
        """
        waited = self._flushing.acquire(timeout=READ_PATIENCE)
        try:
            found = list(IdempotencyCounter.objects.using(using).values_list("operation", "event", "total"))
            if using == alias():
                with self._lock:
                    for counts in (self._pending, self._writing):
                        found += [(operation, event, count) for (operation, event), count in counts.items()]
        finally:
            if waited:
                self._flushing.release()
        read: dict[str, Counter[str]] = {}
        for operation, event, count in found:
            read.setdefault(operation, Counter())[event] += count
        return read


def _database(using: str) -> object:
    """Which database an alias stands for at the moment: test runners put another one in its place for a while."""
    return connections[using].settings_dict["NAME"]


def _in_transaction(using: str) -> bool:
    """Whether one is open in this thread: inside of ``atomic`` too, autocommit is off."""
    connection = connections[using]
    return connection.connection is not None and not connection.get_autocommit()


def _runs_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def _as_it_was(using: str) -> Iterator[None]:
    """Leave the thread's connection open if it was open, and closed if it wasn't.

    Django closes what has to be closed before it gets here, and under ASGI the thread ends with the request: a
    connection that was opened now would belong to nobody.
    """
    connection = connections[using]
    was_open = connection.connection is not None
    try:
        yield
    finally:
        if not was_open:
            connection.close()


def _add(using: str, counts: Counts) -> None:
    def transact() -> None:
        with transaction.atomic(using=using, durable=True):
            sql.store(using).add_counts(counts)

    sql.retry_lost_races(MAX_ROUNDS, using, transact)


counters = Counters()
counters.connect()
