"""Renewal of leases: on a handler's request, and by a heartbeat while it runs.

A heartbeat proves that the process lives, not that the work goes on, so its total is capped: a hung handler keeps its
claim until the cap and not longer. A renewal that finds the lease lost marks the claim. So does the time since the last
renewal, once it exceeds the lease. The handler is then stopped at its next look: ``renew``,
``ensure_owned``, ``step``, ``derive_key``, or the recording of its outcome.

One thread of the process renews for all its handlers, over a connection of its own that comes from no pool. A pool that
is as small as the number of handlers would give it none, and every lease would run out.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from django.db import connections

from .. import sql
from ..exceptions import UnavailableError
from .changes import fenced_change
from .faults import fault_point
from .ownership import Ownership, on_behalf_of
from .transactions import own_transaction, store_errors

logger = logging.getLogger("idempotency")

#: Three chances a lease: one renewal may fail, and one may be late, before it is over.
RENEWALS_A_LEASE = 3

#: How long, in seconds, a handler waits for the thread that renews for it. The statement itself is bounded to less.
PATIENCE = 10.0


def renew(owned: Ownership) -> bool:
    """Prolong the lease. False where another attempt owns the record by now.

    The handler's own transaction would hide the new lease until its end, and lock the record against everybody until
    then, so the statement goes over another connection. Not where the database has one writer: an open transaction of
    ours means that nobody else can write, take-overs included.

    :raises UnavailableError: the store can't be reached. Whether the lease still holds is not known.
    """
    store = sql.store(owned.using)
    with on_behalf_of(owned), store_errors(owned.using):
        if owned.shares_connection or not store.connection.in_atomic_block:
            return fenced_change(owned, lambda: _set_lease(owned))
        if store.has_one_writer:
            row = store.read(owned.scope)
            return row is not None and (row.id, row.attempt) == (owned.record_id, owned.attempt)
        return renewer.renew(owned)


def heartbeat(owned: Ownership) -> AbstractContextManager[None]:
    """Keep the claim alive during the block, if its operation asks for it."""
    cap = owned.operation.heartbeat
    if cap is None or owned.shares_connection:
        return nullcontext()
    needless = owned.operation.transaction and sql.store(owned.using).has_one_writer
    return nullcontext() if needless else _beating(owned, cap.total_seconds())


@contextmanager
def _beating(owned: Ownership, cap: float) -> Iterator[None]:
    beat = renewer.add(owned, cap)
    try:
        yield
    finally:
        # Nobody waits for a renewal that is under way: it is fenced, so it matches nothing once the attempt has ended.
        renewer.stop(beat)
        owned.held_until = None


def _set_lease(owned: Ownership) -> bool:
    return sql.store(owned.using).set_lease(owned.fence, owned.operation.lease, ttl=owned.operation.ttl)


def _set_lease_over_own_connection(owned: Ownership) -> bool:
    """For the renewer's thread, whose connection nobody else uses."""
    connection = connections[owned.using]
    if connection.settings_dict.get("OPTIONS", {}).get("pool"):
        connection = connection.copy()
        del connection.settings_dict["OPTIONS"]["pool"]
        connections[owned.using] = connection
    connection.close_if_unusable_or_obsolete()  # which Django does where a request begins
    with own_transaction(owned.using, f"Operation {owned.operation.name!r}", one_statement=True):
        return _set_lease(owned)


@dataclass
class Beat:
    """One handler's heartbeat. Its moments are those of ``time.monotonic()``; the record's are the database's."""

    owned: Ownership
    ends: float
    stopped: bool = False

    def goes_on(self) -> bool:
        return not self.stopped and time.monotonic() < self.ends


@dataclass(order=True)
class _Task:
    due: float
    number: int
    #: Does the work, and says when to do it again, if at all.
    work: Callable[[], float | None] = field(compare=False)
    beat: Beat | None = field(compare=False, default=None)


class Renewer:
    """The thread that renews, started when there is something to renew and ended when there is nothing left."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start from nothing, as a forked child does: the thread is its parent's."""
        self._changed = threading.Condition()
        self._tasks: list[_Task] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def add(self, owned: Ownership, cap: float) -> Beat:
        """Renew the claim ``RENEWALS_A_LEASE`` times a lease for ``cap`` seconds, or until the beat is stopped."""
        now = time.monotonic()
        lease = owned.operation.lease.total_seconds()
        owned.held_until = now + lease
        beat = Beat(owned, ends=now + cap)
        self._schedule(now + lease / RENEWALS_A_LEASE, lambda: self._renew_for(beat), beat)
        return beat

    def stop(self, beat: Beat) -> None:
        """Renew for this beat no more. A renewal that is under way is not waited for."""
        with self._changed:
            beat.stopped = True
            self._tasks = [task for task in self._tasks if task.beat is not beat]
            heapq.heapify(self._tasks)
            self._changed.notify()

    def renew(self, owned: Ownership) -> bool:
        """Renew the claim once, over this thread's connection.

        :raises UnavailableError: that took too long.
        """
        answer: Future[bool] = Future()

        def work() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(_set_lease_over_own_connection(owned))
            except Exception as error:  # noqa: BLE001 - it is raised where the answer is waited for
                answer.set_exception(error)

        self._schedule(time.monotonic(), work)
        try:
            return answer.result(PATIENCE)
        except FutureTimeoutError as error:
            answer.cancel()
            raise UnavailableError(retry_after=1) from error

    def _renew_for(self, beat: Beat) -> float | None:
        """Renew once. Returns when to do it again, or None for never."""
        owned, now = beat.owned, time.monotonic()
        if not beat.goes_on():
            return None
        lease = owned.operation.lease.total_seconds()
        fault_point("heartbeat.before")
        try:
            with store_errors(owned.using):
                renewed = _set_lease_over_own_connection(owned)
        except UnavailableError:
            logger.warning("Operation %r: its lease could not be renewed", owned.operation.name, exc_info=True)
        else:
            if not beat.goes_on():
                return None  # the attempt ended meanwhile, and nobody asks any more
            if not renewed:
                owned.lost = True
                return None
            owned.held_until = now + lease
        return time.monotonic() + lease / RENEWALS_A_LEASE

    def _schedule(self, due: float, work: Callable[[], float | None], beat: Beat | None = None) -> None:
        with self._changed:
            if beat is not None and beat.stopped:
                return
            heapq.heappush(self._tasks, _Task(due, next(self._numbers), work, beat))
            self._changed.notify()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="idempotency-renewer", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    # No thread can be had. What waits for one finds out when its time is over.
                    logger.exception("Leases can't be renewed")
                else:
                    self._thread = thread

    def _run(self) -> None:
        try:
            while (task := self._next()) is not None:
                due = task.work()
                if due is not None:
                    self._schedule(due, task.work, task.beat)
        finally:
            # Whatever ended this thread, the next task starts another one.
            with self._changed:
                self._thread = None
            connections.close_all()

    def _next(self) -> _Task | None:
        """Wait until a task is due. None when there is none left."""
        with self._changed:
            while self._tasks:
                wait = self._tasks[0].due - time.monotonic()
                if wait <= 0:
                    return heapq.heappop(self._tasks)
                self._changed.wait(wait)
            self._thread = None
            return None


renewer = Renewer()
os.register_at_fork(after_in_child=renewer.reset)
