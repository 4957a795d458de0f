"""The way of a message from the outbox through a real broker to a consumer, all of them killed.

A relay and a Celery worker run as processes of their own (``consumer``), and are started again when they have died.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial

from redis.exceptions import RedisError

from idempotency.contrib.celery import resend_lost_messages
from idempotency.outbox.models import MessageStatus, OutboxMessage
from testproject.celery import app
from testproject.harness.processes import Daemon, Keeper, start_again
from testproject.harness.redis import Redis
from testproject.harness.strikes import Marks, Strike, held, written
from testproject.models import Receipt

from .consumer import VISIBILITY_TIMEOUT
from .plan import Charge, Trouble

QUEUE = "celery"  # where Celery puts what is not routed elsewhere

#: A relay dies twice with its first message: the broker has confirmed it, and nothing is marked.
RELAY_STRIKES = (Strike("relay.published", "child", times=2),)
#: Who dies with which message: the child or the whole worker that has it, or, as ``hold``, the broker. Those of the
#: unprotected orders are acknowledged when they arrive, as Celery does by default, so they are lost.
STRIKES = (("at_work", "child"), ("ended", "group"), ("ended", "hold"), ("ended", "child"))
UNPROTECTED_STRIKES = (("started", "child"), ("started", "child"))

#: How long a broker stays away: long enough that what was under way counts as not acknowledged when it is back.
OUTAGE = VISIBILITY_TIMEOUT + 0.2  # seconds
#: Nothing is under way any more if so many looks in a row have found nothing. In between a worker may have a message
#: that is in no list of the broker's.
LOOKS = 3
#: Nor if all is sent, and nothing has reached a worker for so long, many times what a message that is not acknowledged
#: waits for. What the broker still has then, it will not deliver: a process died in the middle of its bookkeeping.
STALLED_AFTER = 15.0  # seconds


def strikes_of(orders: Sequence[Charge], planned: Sequence[tuple[str, str]]) -> list[Strike]:
    """Who dies with which message, spread over the run, so that there are messages before and after each."""
    accepted = [order for order in orders if not order.declined]
    # A message that is there twice anyhow would hide that one of them was lost.
    once = [order for order in accepted if order.trouble is Trouble.CALM and not order.late_duplicate]
    once = once if len(once) >= len(planned) else accepted
    return [
        Strike(place, act, label=once[(2 * at + 1) * len(once) // (2 * len(planned))].label)
        for at, (place, act) in enumerate(planned)
    ]


class Hop:
    """Relay, worker and broker at work, and what is seen of them."""

    def __init__(self, redis: Redis, marks: Marks, daemons: Sequence[Daemon], run: str) -> None:
        """:param run: the beginning of the labels of the protected orders."""
        self.resent = 0
        self._redis = redis
        self._marks = marks
        self._run = run
        self._keepers = {
            daemon: Keeper(
                partial(start_again, daemon),
                killed=partial(self._killed, f"{daemon.name}s"),
                outages=partial(self._killed, "brokers"),
            )
            for daemon in daemons
        }
        self._quiet = 0
        self._seen = -1
        self._seen_at = 0.0

    def kills(self) -> Counter[str]:
        """How often each kind of process was killed."""
        return Counter(
            relays=self._marks.count("child.relay.*"),
            children=self._marks.count("child.*-*"),
            workers=self._marks.count("group.*"),
            brokers=self._marks.count("go.*"),
        )

    def _killed(self, kind: str) -> int:
        return self.kills()[kind]

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
        return not lost and Receipt.objects.filter(label__startswith=self._run).count() >= self.published()

    def published(self, **conditions: str) -> int:
        """How many messages the orders have published through the outbox."""
        return OutboxMessage.objects.filter(payload__contains=f'"{self._run}', **conditions).count()

    def _is_busy(self) -> bool:
        try:
            return self.published(status=MessageStatus.PENDING) > 0 or self._redis.count(QUEUE) > 0
        except RedisError:
            return True  # it has just been killed

    def _has_stalled(self) -> bool:
        seen = len(self._marks.notes("deliveries")) + len(self._marks.notes("replays")) + self.kills().total()
        if seen != self._seen or self.published(status=MessageStatus.PENDING):
            self._seen, self._seen_at = seen, time.monotonic()
        return time.monotonic() - self._seen_at > STALLED_AFTER

    def what_stopped(self) -> list[str]:
        """Why it must end before its time, or nothing."""
        return [
            f"The {daemon.name} {complaint}. Its log ends with:\n{daemon.log_tail()}"
            for daemon, keeper in self._keepers.items()
            if (complaint := keeper.complaint())
        ]

    def stop(self) -> None:
        """Start nothing any more."""
        for keeper in self._keepers.values():
            keeper.stop()


@contextmanager
def running_hop(redis: Redis, marks: Marks, strikes: Sequence[Strike], run: str) -> Iterator[Hop]:
    """Relay and worker run until the end of the block; nothing of them goes on after it.

    :raises ProcessError: one of them did not start.
    """
    app.loader.import_default_modules()
    with ExitStack() as stack:
        daemons = []
        # The relay first. While the worker comes up it has the messages to itself, so that it dies with some.
        for role in ("relay", "worker"):
            command = [sys.executable, "-m", "testproject.demo.consumer", role]
            environment = {"DEMO_STRIKES": written([*RELAY_STRIKES, *strikes])}
            daemons.append(Daemon(role, command, redis.directory, environment=environment))
            stack.callback(daemons[-1].stop)
        hop = Hop(redis, marks, daemons, run)
        stack.callback(hop.stop)
        yield hop
