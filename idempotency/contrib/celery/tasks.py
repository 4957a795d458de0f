"""Celery tasks for a beat schedule: recovery, purge and, with the outbox, the relay and the search for lost messages.

A task may be lost, run twice or killed, because the next run continues where it ended. So it is acknowledged when it
starts, is never retried, and ends after ``max_batches``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from typing import Any

from celery import shared_task
from django.apps import apps

from ...operate import statistics
from ...operate.purge import DEFAULT_BATCH_SIZE as PURGE_BATCH_SIZE
from ...operate.purge import PurgeResult, other_purges, purge_batches
from ...operate.sweep import DEFAULT_BATCH_SIZE as RECOVERY_BATCH_SIZE
from ...operate.sweep import RecoveryResult, recover_batches

#: Keeps a run within its time limit, and the worker free for other tasks. With the default sizes, a run settles ten
#: thousand claims, purges half a million records and as many messages, or sends ten thousand messages.
MAX_BATCHES = 100

#: Seconds. Reconcilers run one by one, and a hanging reconciler must not block the worker forever. When the limit ends
#: a run, settled claims stay settled, and the claim being reconciled is found again after its lease. A soft limit would
#: raise its exception inside a reconciler, where it counts as ``Unknown``.
TIME_LIMIT = 300


def scheduled(function: Callable[..., Any]) -> Any:
    return shared_task(function, acks_late=False, time_limit=TIME_LIMIT)


@scheduled
def recover_expired_leases(batch_size: int = RECOVERY_BATCH_SIZE, max_batches: int = MAX_BATCHES) -> dict[str, Any]:
    """Settle abandoned claims as their operations declare."""
    result = sum(islice(recover_batches(batch_size=batch_size), max_batches), RecoveryResult())
    statistics.write_counts()  # a worker has no requests that would write them
    return result.as_dict()


@scheduled
def purge_expired_records(batch_size: int = PURGE_BATCH_SIZE, max_batches: int = MAX_BATCHES) -> dict[str, Any]:
    """Delete records, recorded responses and sent messages past their retention."""
    records = sum(islice(purge_batches(batch_size=batch_size), max_batches), PurgeResult())
    others = {
        other.name: sum(islice(other.batches(batch_size=batch_size), max_batches), PurgeResult())
        for other in other_purges()
    }
    return {
        "deleted": records.deleted,
        **{name: result.deleted for name, result in others.items()},
        "exhausted": all(result.exhausted for result in (records, *others.values())),
    }


if apps.is_installed("idempotency.outbox"):
    from ...outbox.relay import DEFAULT_BATCH_SIZE, RelayResult, relay_batches
    from . import lost

    @scheduled
    def relay_outbox(batch_size: int = DEFAULT_BATCH_SIZE, max_batches: int = MAX_BATCHES) -> dict[str, Any]:
        """Send due messages of the outbox."""
        # No batch begins after half of the time limit, because a batch that is cut off is sent again.
        end = time.monotonic() + TIME_LIMIT / 2
        result = RelayResult()
        for batch in islice(relay_batches(batch_size=batch_size), max_batches):
            result += batch
            if time.monotonic() >= end:
                break
        return result.as_dict()

    @scheduled
    def resend_lost_messages(
        older_than: float = lost.OLDER_THAN.total_seconds(), look_back: float = lost.LOOK_BACK.total_seconds()
    ) -> dict[str, Any]:
        """Resend messages that a broker confirmed and then lost. Durations are in seconds."""
        older, back = timedelta(seconds=older_than), timedelta(seconds=look_back)
        return {"found": lost.resend_lost_messages(older_than=older, look_back=back)}
