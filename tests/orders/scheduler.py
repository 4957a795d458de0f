"""One scheduler for threads that share a database: it decides which thread sends its next message.

Each actor is a call in a thread with its own connection. It stops between two messages to the database, including
COMMIT and ROLLBACK, and before each outside effect. In between it does nothing that another actor could observe, so the
orders of these steps cover all orders.

When an actor waits for a lock, the others continue. PostgreSQL reports which session blocks which. SQLite refuses at
once, because its timeout is zero here, and the statement is sent again after each step of another actor. SQLite's busy
handler does the same after a delay.
"""

import copy
import queue
import random
import threading
from enum import Enum, auto
from functools import partial

from django.db import OperationalError, close_old_connections, connection, connections

#: The limit of every wait, in seconds. Correct code never comes near it.
PATIENCE = 60
#: How long a step may take before the server is queried for a lock wait.
PAUSE = 0.003
SQLITE_BUSY = 5
#: The probability that a walk switches to another actor.
SWITCHING = 0.4


class StuckError(Exception):
    """No actor can continue. The schedule is void, which is a failure."""


class State(Enum):
    READY = auto()  # waits at a stop
    RUNNING = auto()
    BLOCKED = auto()  # waits for another one's lock
    DONE = auto()


class Actor:
    """A thread and its connection. It makes one call after the other."""

    def __init__(self, news, options):
        self.state = State.DONE
        self.place = ""
        self.session = None
        self.result = None
        self.error = None
        self.is_open = False
        self._news = news
        self._options = options
        self._calls = queue.SimpleQueue()
        self._go = threading.Semaphore(0)
        #: Whether it has acted since the last stop in a way that others may observe.
        self._acted = False
        self._is_over = False
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def begin(self, call):
        self.state, self.place, self.result, self.error = State.READY, "", None, None
        self._calls.put(call)

    def go(self):
        self.state = State.RUNNING
        self._go.release()

    def end(self):
        self._is_over = True
        self._go.release()
        self._calls.put(None)
        self.thread.join(PATIENCE)

    # In its thread

    def _work(self):
        database = connections["default"]
        database.settings_dict = copy.deepcopy(database.settings_dict)
        database.settings_dict["OPTIONS"].update(self._options)
        database.execute_wrappers.append(self._execute)
        for name in ("_commit", "_rollback"):
            setattr(database, name, partial(self._end_transaction, getattr(database, name), name))
        HERE.actor = self
        while (call := self._calls.get()) is not None:
            self._acted = False
            try:
                self._wait()
                database.ensure_connection()
                self.session = database.connection.info.backend_pid if database.vendor == "postgresql" else None
                self.result = call()
            except Exception as error:  # noqa: BLE001 - it is judged
                self.error = error
            self.is_open = database.in_atomic_block or _has_transaction(database)
            close_old_connections()
            self._news.put((self, State.DONE))
        connections.close_all()

    def _wait(self):
        if not self._go.acquire(timeout=PATIENCE) or self._is_over:
            raise StuckError(f"the actor at {self.place!r} was not continued")

    def before(self, act):
        """Stop before ``act``, unless it has done nothing since the last stop that others could observe."""
        if self._acted:
            self.place = act
            self._news.put((self, State.READY))
            self._wait()
        self._acted = True

    def _execute(self, execute, sql, *rest):
        self.before(str(sql).split()[0])
        while True:
            try:
                return execute(sql, *rest)
            except OperationalError as error:
                if getattr(error.__cause__, "sqlite_errorcode", None) != SQLITE_BUSY:
                    raise
            self._news.put((self, State.BLOCKED))
            self._wait()

    def _end_transaction(self, end, name):
        if _has_transaction(connections["default"]):
            self.before(name.strip("_").upper())
        return end()


#: ``actor`` is the actor of this thread, if any.
HERE = threading.local()


def _has_transaction(database):
    driver = database.connection
    if driver is None:
        return False
    return bool(driver.in_transaction if database.vendor == "sqlite" else driver.pgconn.transaction_status != 0)


class Scheduler:
    """Runs concurrent calls, one step at a time."""

    def __init__(self, actors, level=""):
        """:param level: a psycopg isolation level, such as ``REPEATABLE_READ``; by default the database's."""
        options = {"timeout": 0} if connection.vendor == "sqlite" else {}
        if level:
            from psycopg import IsolationLevel

            options["isolation_level"] = IsolationLevel[level]
        self._news = queue.SimpleQueue()
        self._actors = [Actor(self._news, options) for _ in range(actors)]
        #: How often an actor waited for another one's lock.
        self.blocked = 0

    def run(self, calls, choose, after_step):
        """Make the calls, each in a thread. ``choose`` gets the numbers of the actors that can continue.

        :returns: the actors, and the order of their steps.
        """
        actors = self._actors[: len(calls)]
        for actor, call in zip(actors, calls, strict=True):
            actor.begin(call)
        order = ""
        while ready := [number for number, actor in enumerate(actors) if actor.state is State.READY]:
            number = choose(ready)
            order += str(number)
            actors[number].go()
            self._settle(actors)
            after_step()
        return actors, order

    def _settle(self, actors):
        """Wait until each actor is at a stop, is done, or waits for a lock of one at a stop."""
        checked = set()
        for _ in range(int(PATIENCE / PAUSE)):
            running = [actor for actor in actors if actor.state is State.RUNNING]
            waiting = [actor for actor in actors if actor.state is State.BLOCKED and actor not in checked]
            if not running and not waiting:
                if any(actor.state is State.READY for actor in actors) or not checked:
                    return
                checked.clear()  # a deadlock: the server is about to refuse one of them
            if not running:
                self._look_again(waiting, checked)
            try:
                actor, state = self._news.get(timeout=PAUSE if running else 0)
            except queue.Empty:
                for actor in running:
                    if actor.session and self._is_blocked(actor, actors):
                        actor.state = State.BLOCKED
                        checked.add(actor)
                        self.blocked += 1
            else:
                if state is State.BLOCKED:
                    checked.add(actor)
                    self.blocked += 1
                actor.state = state
        raise StuckError(f"after {PATIENCE} s: {[(actor.state.name, actor.place) for actor in actors]}")

    def _look_again(self, waiting, checked):
        for actor in waiting:
            checked.add(actor)
            if actor.session is None:
                actor.go()
            elif not self._is_blocked(actor, self._actors):
                actor.state = State.RUNNING

    def _is_blocked(self, actor, actors):
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_blocking_pids(%s) && %s::int[]", [actor.session, [other.session for other in actors]]
            )
            return bool(cursor.fetchone()[0])

    def close(self):
        for actor in self._actors:
            actor.end()


def every_order(run, switches=None):
    """Call ``run`` for each order of its actors' steps, depth first.

    :param switches: at most how often an actor that could continue is made to wait. Few bugs need more than two.
    """
    begun = []
    while True:
        path = Path(begun, switches)
        run(path.choose)
        taken = path.taken
        while taken and taken[-1][0] + 1 >= taken[-1][1]:
            taken.pop()
        if not taken:
            return
        begun = [choice for choice, _ in taken[:-1]] + [taken[-1][0] + 1]


class Path:
    """One order: the given choices, and then always the first possibility."""

    def __init__(self, begun, switches):
        self._begun = begun
        self._left = switches
        self._current = None
        #: Each choice, and the number of possibilities.
        self.taken = []

    def choose(self, ready):
        goes_on = self._current in ready
        if goes_on and self._left == 0:
            return self._current
        if goes_on:
            ready = sorted(ready, key=lambda number: number != self._current)
        place = len(self.taken)
        choice = min(self._begun[place] if place < len(self._begun) else 0, len(ready) - 1)
        self.taken.append((choice, len(ready)))
        if goes_on and choice and self._left is not None:
            self._left -= 1
        self._current = ready[choice]
        return self._current


def walk(seed):
    """An order determined by its seed. An actor mostly continues, as processes do."""
    chance = random.Random(seed)
    current = [-1]

    def choose(ready):
        if current[0] not in ready or chance.random() < SWITCHING:
            current[0] = chance.choice(ready)
        return current[0]

    return choose
