"""Threads that start together or are held at a gate. Their errors surface in the test."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from django.db import connection, connections, transaction

from tests.providers import eventually

#: The limit of every wait in a test: long enough for a busy machine, short enough that a deadlock is reported.
PATIENCE = 60


def race(calls):
    """Make all calls at once, each in its own thread with its own connections. Return the results in order."""
    start = threading.Barrier(len(calls))

    def run(call):
        start.wait(PATIENCE)
        return _call(call)

    with ThreadPoolExecutor(max_workers=len(calls)) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(run, call) for call in calls]]


def elsewhere(call):
    """Make the call in another thread, and so on other connections. Returns its result."""
    return race([call])[0]


@contextmanager
def held(call, gate):
    """In the block, another thread's call waits at its gate. The call finishes when the block ends."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(_call, call)
        gate.wait_until_reached()
        try:
            yield future
        finally:
            gate.open()
        future.result(PATIENCE)  # raises its error


def is_waited_for():
    """Whether a statement waits for a lock of this thread's transaction, on PostgreSQL."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY(pg_blocking_pids(pid))")
        return cursor.rowcount > 0


@contextmanager
def changing_elsewhere(changes, then=lambda: None):
    """Another transaction makes changes, and commits them once a statement of the block waits for it."""
    changed = threading.Event()

    def change_and_hold():
        with transaction.atomic():
            changes()
            changed.set()
            assert eventually(is_waited_for)
            then()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(_call, change_and_hold)
        assert changed.wait(PATIENCE)
        yield
        other.result(PATIENCE)


def _call(call):
    try:
        return call()
    finally:
        connections.close_all()


class Gate:
    """A gate at which a handler stops until the test releases it."""

    def __init__(self):
        self._reached = threading.Event()
        self._open = threading.Event()

    def pass_through(self):
        self._reached.set()
        assert self._open.wait(PATIENCE), "the gate was not opened"

    def wait_until_reached(self):
        assert self._reached.wait(PATIENCE), "the gate was not reached"

    def open(self):
        self._open.set()
