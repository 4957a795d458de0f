"""Renewal of leases: at the handler's request, and by a heartbeat while the handler runs.

A heartbeat proves that the process is alive, but not that the work makes progress. So its total time is capped. If a
renewal detects that the lease is lost, or if no renewal has succeeded for a whole lease, the claim is marked as lost.
The handler then gets an error from its next ``renew``, ``ensure_owned``, ``step`` or ``derive_key``, or when its
outcome is recorded.

Each process has one renewing thread for each database, so a database that hangs delays no renewals in another one. The
thread's connection does not come from Django's pool, because handlers may hold all connections of a small pool, and
every lease would run out. The same applies to a pooler outside of the process. So ``RENEWAL_DATABASES`` may name
another alias for the same database.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import Final

from django.db import connections

from ..conf import settings
from ..exceptions import UnavailableError
from ..foreign import in_atomic_block
from ..store import store_for
from ..store.own_connection import open_own_connection
from .faults import fault_point
from .ownership import Ownership, fenced_change, on_behalf_of, store_errors

logger: Final = logging.getLogger("idempotency")

#: Three renewals in each lease, so that one may fail and one may be late before the lease is over.
RENEWALS_A_LEASE = 3

#: How long, in seconds, a handler waits for the renewing thread.
LONGEST_WAIT = 10.0


def renew(owned: Ownership) -> bool:
    """Renew the lease.

    In an open transaction of the handler's connection, the new lease would be invisible and the record locked until the
    transaction ends. So the statement is sent over another connection. If the database has a single writer, the
    transaction blocks all other writes. So no other attempt can take over, and reading the record is enough.

    :returns: False if another attempt owns the record.
    :raises UnavailableError: the database can't be reached, and whether the lease is still valid is unknown.
    """
    store = store_for(owned.using)
    with on_behalf_of(owned), store_errors(owned.using):
        if owned.shares_connection or not in_atomic_block(store.connection):
            return fenced_change(owned, lambda: _set_lease(owned))
        if store.has_one_writer:
            row = store.read(owned.scope)
            return row is not None and row.fence == owned.fence
        return renewer_of(owned.using).renew(owned)


def heartbeat(owned: Ownership, cap: timedelta) -> AbstractContextManager[None]:
    """Renew the lease during the block, for ``cap`` in total."""
    return nullcontext() if owned.is_exclusive else _renewing(owned, cap.total_seconds())


@contextmanager
def _renewing(owned: Ownership, cap: float) -> Iterator[None]:
    task = renewer_of(owned.using).add(owned, cap)
    try:
        yield
    finally:
        # Don't wait for a renewal in progress. It is fenced, so it matches no row once the attempt has ended. In a
        # forked child this is another renewer, because the parent's lock may never be released there.
        renewer_of(owned.using).stop(task)
        owned.held_until = None


def _set_lease(owned: Ownership) -> bool:
    return store_for(owned.using).set_lease(owned.fence, owned.policy.lease, retention=owned.policy.retention)


def _set_lease_over_own_connection(owned: Ownership) -> bool:
    """Renew the lease in the renewer's thread."""
    connections[owned.using].close_if_unusable_or_obsolete()  # as Django does at the beginning of a request
    with store_for(owned.using).own_statement(owned.policy.operation):
        return _set_lease(owned)


@dataclass(eq=False)
class Task:
    """A unit of work for a renewer. Times are from ``time.monotonic()``, not from the database's clock."""

    #: Does the work and returns when it is due again, or None for never.
    work: Callable[[], float | None]
    due: float = 0.0
    is_stopped: bool = False


class Renewer:
    """The thread that renews leases in one database. It starts with the first task and ends when none is left."""

    def __init__(self, using: str) -> None:
        self._using = using
        self._changed = threading.Condition()
        self._tasks: list[Task] = []
        self._thread: threading.Thread | None = None

    def add(self, owned: Ownership, cap: float) -> Task:
        """Renew the claim ``RENEWALS_A_LEASE`` times a lease, for ``cap`` seconds or until the task is stopped."""
        now, lease = time.monotonic(), owned.policy.lease.total_seconds()
        owned.held_until = now + lease

        def renew_again() -> float | None:
            # After ``begin()`` a single writer's transaction would block the renewal.
            if task.is_stopped or owned.is_exclusive or time.monotonic() >= now + cap:
                return None
            return self._renew_for(owned, task)

        task = Task(renew_again, due=now + lease / RENEWALS_A_LEASE)
        self._schedule(task)
        return task

    def stop(self, task: Task) -> None:
        """Cancel a task. Does not wait for a renewal in progress."""
        with self._changed:
            task.is_stopped = True
            self._tasks = [other for other in self._tasks if other is not task]
            self._changed.notify()

    def renew(self, owned: Ownership) -> bool:
        """Renew the claim once, over the renewing thread's connection. Results and errors are as for ``renew()``."""
        answer: Future[bool] = Future()

        def work() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(_set_lease_over_own_connection(owned))
            except Exception as error:  # noqa: BLE001 - the waiting handler raises it
                answer.set_exception(error)

        self._schedule(Task(work))
        try:
            return answer.result(LONGEST_WAIT)
        except FutureTimeoutError as error:
            answer.cancel()
            raise UnavailableError(retry_after=1) from error

    def _renew_for(self, owned: Ownership, task: Task) -> float | None:
        """Renew once, for a heartbeat, and return when to renew again, or None for never."""
        now, lease = time.monotonic(), owned.policy.lease.total_seconds()
        fault_point["heartbeat.before"]()
        try:
            with store_errors(owned.using):
                renewed = _set_lease_over_own_connection(owned)
        except UnavailableError:
            logger.warning(
                "Attempt %d of %s: its lease could not be renewed", owned.attempt, owned.scope, exc_info=True
            )
        else:
            if task.is_stopped:
                return None  # the attempt has ended meanwhile
            if not renewed:
                owned.lost = True
                return None
            owned.held_until = now + lease
        return time.monotonic() + lease / RENEWALS_A_LEASE

    def _schedule(self, task: Task) -> None:
        with self._changed:
            if task.is_stopped:
                return
            self._tasks.append(task)
            self._changed.notify()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=f"idempotency-renewer-{self._using}", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    # No thread can be started. A handler that waits for a renewal gets an error after LONGEST_WAIT.
                    logger.exception("Leases can't be renewed")
                else:
                    self._thread = thread

    def _run(self) -> None:
        try:
            open_own_connection(self._using, settings().renewal_databases.get(self._using, self._using))
            while (task := self._next()) is not None:
                due = task.work()
                if due is not None:
                    task.due = due
                    self._schedule(task)
        finally:
            # After an error, too, the next task must start a new thread.
            with self._changed:
                self._thread = None
            connections.close_all()

    def _next(self) -> Task | None:
        """Wait until a task is due, and return it. None if no task is left."""
        with self._changed:
            while self._tasks:
                task = min(self._tasks, key=attrgetter("due"))
                wait = task.due - time.monotonic()
                if wait <= 0:
                    self._tasks.remove(task)
                    return task
                self._changed.wait(wait)
            self._thread = None
            return None


_renewers: dict[str, Renewer] = {}
# The threads exist only in the parent.
os.register_at_fork(after_in_child=_renewers.clear)


def renewer_of(using: str) -> Renewer:
    """The renewer for a database. Concurrent first calls get the same one."""
    return _renewers.setdefault(using, Renewer(using))
