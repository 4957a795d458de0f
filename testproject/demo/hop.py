"""The way from the handler through the outbox and a real broker to a consumer, all of them killed.

A relay and a Celery worker run as processes of their own (``consumer``), and are started again when they have died.
``acts`` says who dies with which message in hand.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial

from redis.exceptions import RedisError

from idempotency.contrib.celery import resend_lost_messages
from testproject.celery import app
from testproject.harness.processes import Daemon, Keeper, start_again
from testproject.harness.redis import Redis
from testproject.harness.strikes import Marks, held, written

from .acts import RELAY_STRIKES, Side, strikes_of
from .books import Books
from .consumer import VISIBILITY_TIMEOUT
from .plan import Charge, Plan

QUEUE = "celery"  # where Celery puts what nobody has routed elsewhere

#: How long a broker stays away: long enough that what was under way counts as not acknowledged when it is back.
OUTAGE = VISIBILITY_TIMEOUT + 0.2  # seconds

#: Nothing is under way any more if so many looks in a row have found nothing. In between a worker may have a message
#: that is in no list of the broker's.
LOOKS = 3
#: Nor if all is sent, and nothing has reached a worker for so long, many times what a message that is not acknowledged
#: waits for. What the broker still has then, it will not deliver: a process died in the middle of its bookkeeping.
STALLED_AFTER = 15.0  # seconds

#: A fee that the provider is slow to answer is not to fail: what is shown here is what becomes of messages.
PROVIDER_TIMEOUT = 15.0


class Hop:
    """Relay, worker and broker at work, and what is seen of them."""

    def __init__(self, redis: Redis, marks: Marks, daemons: Sequence[Daemon], books: Books) -> None:
        self.resent = 0
        self._redis = redis
        self._marks = marks
        self._books = books
        self.keepers = {daemon: self._keeper_of(daemon) for daemon in daemons}
        self._quiet = 0
        self._seen = -1
        self._seen_at = 0.0

    def _keeper_of(self, daemon: Daemon) -> Keeper[Daemon]:
        return Keeper(
            partial(start_again, daemon),
            killed=lambda: self.kills()[f"{daemon.name}s"],
            outages=lambda: self.kills()["brokers"],
        )

    def kills(self) -> dict[str, int]:
        """How often each kind of process was killed."""
        return {
            "relays": self._marks.count("child.relay.*"),
            "children": self._marks.count("child.*-*"),
            "workers": self._marks.count("group.*"),
            "brokers": self._marks.count("go.*"),
        }

    @property
    def ended(self) -> int:
        """How often relay or worker ended by itself, and was started again."""
        return sum(keeper.ended for keeper in self.keepers.values())

    def is_over(self) -> bool:
        """Whether all that was published has been consumed, and acknowledged. To be asked a few times a second."""
        for label in held(self._marks):  # a worker's child waits until the broker has died
            self._redis.kill()
            time.sleep(OUTAGE)
            self._redis.start()
            self._marks.leave(f"go.{label}")
        self._quiet = 0 if self._is_busy() else self._quiet + 1
        if self._quiet < LOOKS and not self._has_stalled():
            return False
        # Redis loses a message if whoever takes it off its list dies before it has noted that. The outbox still has it.
        lost = resend_lost_messages(older_than=timedelta(0), app=app)
        self.resent += lost
        self._quiet, self._seen = 0, -1
        # A message whose worker was killed is not lost. It comes again when a new worker is up, which may take long.
        return not lost and self._books.are_messages_done()

    def _is_busy(self) -> bool:
        try:
            return self._books.are_messages_pending() or self._redis.count(QUEUE) > 0
        except RedisError:
            return True  # it has just been killed

    def _has_stalled(self) -> bool:
        seen = len(self._marks.notes("deliveries")) + len(self._marks.notes("replays")) + sum(self.kills().values())
        if seen != self._seen or self._books.are_messages_pending():
            self._seen, self._seen_at = seen, time.monotonic()
        return time.monotonic() - self._seen_at > STALLED_AFTER

    def what_stopped(self) -> list[str]:
        """Why it must end before its time, or nothing."""
        return [
            f"The {daemon.name} {complaint}. Its log ends with:\n{daemon.log_tail()}"
            for daemon, keeper in self.keepers.items()
            if (complaint := keeper.complaint())
        ]

    def stop(self) -> None:
        """Start nothing any more."""
        for keeper in self.keepers.values():
            keeper.stop()


@contextmanager
def running_hop(
    redis: Redis, marks: Marks, plan: Plan, books: Books, drawn: Mapping[Side, Sequence[Charge]]
) -> Iterator[Hop]:
    """Relay and worker run until the end of the block; nothing of them goes on after it.

    :raises ProcessError: one of them did not start.
    """
    strikes = [*RELAY_STRIKES, *(strike for side, orders in drawn.items() for strike in strikes_of(side, orders))]
    environment = {
        "DEMO_STRIKES": written(strikes),
        "IDEMPOTENCY_LEASE_SECONDS": str(plan.lease),
        "PROVIDER_TIMEOUT": str(PROVIDER_TIMEOUT),
    }
    app.loader.import_default_modules()
    with ExitStack() as stack:
        daemons = []
        # The relay first. While the worker comes up it has the messages to itself, so that it dies with some.
        for role in ("relay", "worker"):
            command = [sys.executable, "-m", "testproject.demo.consumer", role]
            daemons.append(Daemon(role, command, redis.directory, environment=environment))
            stack.callback(daemons[-1].stop)
        hop = Hop(redis, marks, daemons, books)
        stack.callback(hop.stop)
        yield hop
