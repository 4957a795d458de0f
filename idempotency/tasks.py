"""Recovery, purge, relay and the search for lost messages as Celery tasks, for a beat schedule.

Celery's autodiscovery finds them.

All are safe to lose, to run twice and to kill, because the next run does what this one left. So they are acknowledged
when they start, are never retried by Celery, and end after a bounded number of batches. A schedule should let them
expire rather than queue up: ``"options": {"expires": seconds}``.
"""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any

from .outbox.backlog import purge_sent_batches
from .outbox.relay import DEFAULT_BATCH_SIZE as RELAY_BATCH_SIZE
from .outbox.relay import RelayResult, relay_batches
from .upkeep.counters import counters
from .upkeep.retention import DEFAULT_BATCH_SIZE as PURGE_BATCH_SIZE
from .upkeep.retention import PurgeResult, purge_batches
from .upkeep.sweep import DEFAULT_BATCH_SIZE as RECOVERY_BATCH_SIZE
from .upkeep.sweep import RecoveryResult, recover_batches

try:
    from celery import shared_task
except ImportError as error:
    raise ImportError(
        "idempotency.tasks needs Celery. Install it with\n    python -m pip install 'django-idempotency[celery]'"
    ) from error

from .contrib.celery import lost

#: What one run does at most: ten thousand abandoned claims, a hundred thousand records and as many messages to purge,
#: ten thousand messages to send. More than that is the next run's, so that a run stays within its time limit and leaves
#: the worker to others.
MAX_BATCHES = 100

#: Seconds. Reconcilers ask one after the other, and one that hangs must not hold the worker for good. What was settled
#: stays settled, and the claim that was being asked for is found again after its lease. No soft limit: it would be one
#: more exception of a reconciler, and those are answers that nobody got.
TIME_LIMIT = 300


def _recover_expired_leases(batch_size: int = RECOVERY_BATCH_SIZE, max_batches: int = MAX_BATCHES) -> dict[str, Any]:
    """Settle abandoned claims as their operations declare, up to ``max_batches`` batches of ``batch_size``.

    :returns: counts of records: ``recoverable``, ``completed``, ``parked``, ``postponed``; ``unknown_operations``, by
        name; and ``exhausted``, False where the next run has something to do already.
    """
    result = sum(islice(recover_batches(batch_size=batch_size), max_batches), RecoveryResult())
    counters.flush()  # a worker has no requests after which it would be done
    return result.as_dict()


def _purge_expired_records(batch_size: int = PURGE_BATCH_SIZE, max_batches: int = MAX_BATCHES) -> dict[str, Any]:
    """Delete records past retention, up to ``max_batches`` batches of ``batch_size``, and as many messages that were
    sent longer ago than ``TTL`` and a day. Parked records stay, and so do messages that were not sent.

    :returns: ``deleted``, a count of records; ``messages``, one of messages; and ``exhausted``, False where the next
        run has something to do already.
    """
    records = sum(islice(purge_batches(batch_size=batch_size), max_batches), PurgeResult())
    messages = sum(islice(purge_sent_batches(batch_size=batch_size), max_batches), PurgeResult())
    return {
        "deleted": records.deleted,
        "messages": messages.deleted,
        "exhausted": records.exhausted and messages.exhausted,
    }


def _relay_outbox(batch_size: int = RELAY_BATCH_SIZE, max_batches: int = MAX_BATCHES) -> dict[str, Any]:
    """Send messages of the outbox that are due, up to ``max_batches`` batches of ``batch_size``.

    Begins no batch after half of the time limit: one that the limit cuts off is sent again.

    :returns: counts of messages: ``sent``, ``postponed``, ``dead``, ``put_back``; ``unavailable``, the senders whose
        broker can't be reached, with the error; and ``exhausted``, False where the next run has something to do.
    """
    end = time.monotonic() + TIME_LIMIT / 2
    result = RelayResult()
    for batch in islice(relay_batches(batch_size=batch_size), max_batches):
        result += batch
        if time.monotonic() >= end:
            break
    return result.as_dict()


def _resend_lost_messages(
    older_than: float = lost.OLDER_THAN.total_seconds(), look_back: float = lost.LOOK_BACK.total_seconds()
) -> dict[str, Any]:
    """Have messages sent again that a broker has confirmed and lost: see ``contrib.celery.resend_lost_messages``.

    :param older_than: seconds since a message was sent that is taken for lost.
    :param look_back: seconds since a message was sent that is not looked at any more.
    :returns: ``found``, a count of messages.
    """
    return {
        "found": lost.resend_lost_messages(
            older_than=timedelta(seconds=older_than), look_back=timedelta(seconds=look_back)
        )
    }


_task = partial(shared_task, acks_late=False, time_limit=TIME_LIMIT)

# Not as decorators: Celery has no types, and what it decorates would have none either.
recover_expired_leases = _task(name="idempotency.tasks.recover_expired_leases")(_recover_expired_leases)
purge_expired_records = _task(name="idempotency.tasks.purge_expired_records")(_purge_expired_records)
resend_lost_messages = _task(name="idempotency.tasks.resend_lost_messages")(_resend_lost_messages)
relay_outbox = _task(name="idempotency.tasks.relay_outbox")(_relay_outbox)
