"""The last part of the demo: from the handler through the outbox and a real broker to a consumer, all of them killed.

Redis, a relay and a Celery worker run as processes of their own. ``orders`` says what is sent and who dies with which
message in hand, ``killer`` sees to that, ``consumer`` is relay and worker.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from redis.exceptions import RedisError

from .broker import Redis
from .killer import Killer
from .orders import Order, Side, strikes_of
from .plan import Plan
from .processes import Daemon, Guard

QUEUE = "celery"  # where Celery puts what nobody has routed elsewhere

#: Nothing is under way any more if so many looks in a row have found nothing. In between a worker may have a message
#: that is in no list of the broker's.
LOOKS = 3
LOOK_EVERY = 0.1  # seconds
#: Nor if all is sent, and nothing has reached a worker for so long, many times what a message that is not acknowledged
#: waits for. What the broker still has then, it will not deliver: a process died in the middle of its bookkeeping.
STALLED_AFTER = 15.0  # seconds

#: A fee that the provider is slow to answer is not to fail: what is shown here is what becomes of messages.
PROVIDER_TIMEOUT = 15.0


class Hop:
    """Relay, worker and broker at work, and what is seen of them."""

    def __init__(self, redis: Redis, killer: Killer, relay: Daemon, worker: Daemon, run: str) -> None:
        self.killer = killer
        self._redis = redis
        self.daemons = (redis.daemon, relay, worker)
        self._run = run
        self._quiet = 0
        self._seen = -1
        self._seen_at = time.monotonic()

    @property
    def kills(self) -> int:
        return self.killer.kills.total()

    def is_over(self) -> bool:
        """Whether all that was published has been consumed, and acknowledged. Takes a moment."""
        time.sleep(LOOK_EVERY)
        self._quiet = 0 if self._is_busy() else self._quiet + 1
        return self._quiet >= LOOKS or self._has_stalled()

    def _has_stalled(self) -> bool:
        from . import ledger

        seen = self.killer.deliveries.total() + self.killer.replays + self.kills
        if seen != self._seen or ledger.are_messages_pending(self._run):
            self._seen, self._seen_at = seen, time.monotonic()
        return time.monotonic() - self._seen_at > STALLED_AFTER

    def _is_busy(self) -> bool:
        from . import ledger

        try:
            return ledger.are_messages_pending(self._run) or not self._redis.is_empty(QUEUE)
        except RedisError:
            return True  # it has just been killed

    def what_stopped(self) -> list[str]:
        """Why it must end before its time, or nothing."""
        ended = [daemon for daemon in self.daemons if daemon.has_ended()]
        found = [f"{daemon.name} ended by itself. Its log ends with:\n{daemon.log_tail()}" for daemon in ended]
        return [*found, self.killer.error] if self.killer.error else found


@contextmanager
def running_hop(
    redis: Redis, guard: Guard, plan: Plan, directory: Path, run: str, orders: Mapping[Side, Sequence[Order]]
) -> Iterator[Hop]:
    """Relay and worker run until the end of the block; nothing of them goes on after it.

    :raises ProcessError: one of them did not start.
    """
    address = redis.socket.with_name("killer.sock")
    environment = {
        "DEMO_KILLER": str(address),
        "IDEMPOTENCY_LEASE_SECONDS": str(plan.lease),
        "PROVIDER_TIMEOUT": str(PROVIDER_TIMEOUT),
    }
    relay, worker = (
        Daemon(
            role,
            [sys.executable, "-m", "testproject.demo.consumer", role],
            guard,
            directory,
            environment=environment,
        )
        for role in ("relay", "worker")
    )
    planned = [(order.label, side) for side, drawn in orders.items() for order in drawn]
    strikes = {key: strike for drawn in orders.values() for key, strike in strikes_of(drawn).items()}
    killer = Killer(address, relay, worker, redis.daemon, strikes, dict(planned))
    try:
        # The relay first. While the worker comes up it has the messages to itself, so that it dies with some.
        with relay.running(), worker.running():
            try:
                yield Hop(redis, killer, relay, worker, run)
            finally:
                killer.rest()
    finally:
        killer.close()
