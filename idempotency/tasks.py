"""Celery tasks for a beat schedule: recovery, purge, relay, and the search for lost messages.

Celery's autodiscovery finds them.

Each task may be lost, run twice or killed, because the next run does what this one left undone. So a task is
acknowledged when it starts, Celery never retries it, and it ends after a bounded number of batches. A schedule should
let waiting tasks expire, so that they don't pile up: ``"options": {"expires": seconds}``.
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
from .upkeep.bodies import purge_body_batches
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

#: One run takes at most this many batches. With the default sizes it settles ten thousand abandoned claims, purges a
#: hundred thousand records and as many messages, or sends ten thousand messages. The rest is left to the next run, so
#: that a run stays within its time limit and the worker is free for other tasks.
MAX_BATCHES = 100

#: Seconds. Reconcilers run one after the other, and one that hangs must not block the worker for ever. When the limit
#: ends a run, what was settled stays settled, and a claim that was being reconciled is found again after its lease.
#: There is no soft limit, because its exception would be raised inside a reconciler and count as the answer
#: ``Unknown``.
TIME_LIMIT = 300


def _recover_expired_leases(batch_size: int = RECOVERY_BATCH_SIZE, max_batches: int = MAX_BATCHES) -> dict[str, Any]:
    """Settle abandoned claims as their operations declare, up to ``max_batches`` batches of ``batch_size``.

    :returns: counts of records: ``recoverable``, ``completed``, ``parked``, ``postponed``; ``unknown_operations``,
        counts by name; and ``exhausted``, False if more is due already.
    """
    result = sum(islice(recover_batches(batch_size=batch_size), max_batches), RecoveryResult())
    counters.flush()  # a worker has no requests after which the counters are written
    return result.as_dict()


def _purge_expired_records(batch_size: int = PURGE_BATCH_SIZE, max_batches: int = MAX_BATCHES) -> dict[str, Any]:
    """Delete records past retention, recorded responses past a shorter one of their own, and messages that were sent
    longer ago than ``TTL`` and a day.

    Of each it takes up to ``max_batches`` batches of ``batch_size``. Parked records and unsent messages stay.

    :returns: counts: ``deleted`` of records, ``bodies`` of responses, ``messages`` of messages; and ``exhausted``,
        False if more is due already.
    """
    records = sum(islice(purge_batches(batch_size=batch_size), max_batches), PurgeResult())
    bodies = sum(islice(purge_body_batches(batch_size=batch_size), max_batches), PurgeResult())
    messages = sum(islice(purge_sent_batches(batch_size=batch_size), max_batches), PurgeResult())
    return {
        "deleted": records.deleted,
        "bodies": bodies.deleted,
        "messages": messages.deleted,
        "exhausted": records.exhausted and bodies.exhausted and messages.exhausted,
    }


def _relay_outbox(batch_size: int = RELAY_BATCH_SIZE, max_batches: int = MAX_BATCHES) -> dict[str, Any]:
    """Send messages of the outbox that are due, up to ``max_batches`` batches of ``batch_size``.

    No batch begins after half of the time limit, because a batch that the limit cuts off is sent again.

    :returns: counts of messages: ``sent``, ``postponed``, ``dead``, ``put_back``; ``unavailable``, the senders whose
        broker can't be reached, each with the error; and ``exhausted``, False if more can be sent already.
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
    """Have messages sent again that a broker confirmed and lost. See ``contrib.celery.resend_lost_messages``.

    :param older_than: in seconds. Messages that were sent later than this ago are not looked at yet.
    :param look_back: in seconds. Messages that were sent longer ago than this are not looked at any more.
    :returns: ``found``, a count of messages.
    """
    return {
        "found": lost.resend_lost_messages(
            older_than=timedelta(seconds=older_than), look_back=timedelta(seconds=look_back)
        )
    }


_task = partial(shared_task, acks_late=False, time_limit=TIME_LIMIT)

# Not written as decorators, because Celery has no types and the decorated functions would lose theirs.
recover_expired_leases = _task(name="idempotency.tasks.recover_expired_leases")(_recover_expired_leases)
purge_expired_records = _task(name="idempotency.tasks.purge_expired_records")(_purge_expired_records)
resend_lost_messages = _task(name="idempotency.tasks.resend_lost_messages")(_resend_lost_messages)
relay_outbox = _task(name="idempotency.tasks.relay_outbox")(_relay_outbox)
