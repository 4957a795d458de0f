"""Celery tasks for a beat schedule: recovery, purge and, with the outbox, the relay and the search for lost messages.

A task may be lost, run twice or killed, because the next run continues where it ended. So it is acknowledged when it
starts, is never retried, and begins no batch after half of its time limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

from celery import shared_task
from django.apps import apps

from ...operate import statistics
from ...operate.batches import BatchResult
from ...operate.purge import DEFAULT_BATCH_SIZE as PURGE_BATCH_SIZE
from ...operate.purge import PurgeResult, other_purges, purge_batches
from ...operate.sweep import DEFAULT_BATCH_SIZE as RECOVERY_BATCH_SIZE
from ...operate.sweep import RecoveryResult, recover_batches

_Result = TypeVar("_Result", bound=BatchResult)

#: Seconds. Reconcilers run one by one, and a hanging reconciler must not block the worker forever. When the limit ends
#: a run, settled claims stay settled, and the claim being reconciled is found again after its lease. A soft limit would
#: raise its exception inside a reconciler, where it counts as ``Unknown``.
TIME_LIMIT = 300


def scheduled(function: Callable[..., Any]) -> Any:
    return shared_task(function, acks_late=False, time_limit=TIME_LIMIT)


def _end() -> float:
    """When a run begins its last batch. The other half of the time limit is for that batch, because a message of a
    batch that is cut off is sent again.
    """
    return time.monotonic() + TIME_LIMIT / 2


def _sum(batches: Iterator[_Result], total: _Result, end: float) -> _Result:
    for batch in batches:
        total += batch
        if time.monotonic() >= end:
            break
    return total


@scheduled
def recover_expired_leases(batch_size: int = RECOVERY_BATCH_SIZE) -> dict[str, Any]:
    """Settle abandoned claims as their operations declare."""
    result = _sum(recover_batches(batch_size=batch_size), RecoveryResult(), _end())
    statistics.write_counts()  # a worker has no requests that would write them
    return result.as_dict()


@scheduled
def purge_expired_records(batch_size: int = PURGE_BATCH_SIZE) -> dict[str, Any]:
    """Delete records, recorded responses and sent messages past their retention."""
    end = _end()
    records = _sum(purge_batches(batch_size=batch_size), PurgeResult(), end)
    others = {other.name: _sum(other.batches(batch_size=batch_size), PurgeResult(), end) for other in other_purges()}
    return {
        "deleted": records.deleted,
        **{name: result.deleted for name, result in others.items()},
        "exhausted": all(result.exhausted for result in (records, *others.values())),
    }


if apps.is_installed("idempotency.outbox"):
    from ...outbox.relay import DEFAULT_BATCH_SIZE, RelayResult, relay_batches
    from . import lost

    @scheduled
    def relay_outbox(batch_size: int = DEFAULT_BATCH_SIZE) -> dict[str, Any]:
        """Send due messages of the outbox."""
        return _sum(relay_batches(batch_size=batch_size), RelayResult(), _end()).as_dict()

    @scheduled
    def resend_lost_messages(
        older_than: float = lost.OLDER_THAN.total_seconds(), look_back: float = lost.LOOK_BACK.total_seconds()
    ) -> dict[str, Any]:
        """Resend messages that a broker confirmed and then lost. Durations are in seconds."""
        older, back = timedelta(seconds=older_than), timedelta(seconds=look_back)
        return {"found": lost.resend_lost_messages(older_than=older, look_back=back)}
