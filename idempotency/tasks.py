"""Recovery and purge as Celery tasks, for a beat schedule. Celery's autodiscovery finds them.

Both are safe to lose, to run twice and to kill, because the next run does what this one left. So they are acknowledged
when they start, are never retried by Celery, and end after a bounded number of batches. A schedule should let them
expire rather than queue up: ``"options": {"expires": seconds}``.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from .recovery import DEFAULT_BATCH_SIZE as RECOVERY_BATCH_SIZE
from .recovery import RecoveryResult, describe, recover_batches
from .retention import DEFAULT_BATCH_SIZE as PURGE_BATCH_SIZE
from .retention import purge_batches

try:
    from celery import shared_task
except ImportError as error:
    raise ImportError(
        "idempotency.tasks needs Celery. Install it with\n    python -m pip install 'django-idempotency[celery]'"
    ) from error

#: What one run does at most: ten thousand abandoned claims, a hundred thousand records to purge. More than that is the
#: next run's, so that a run stays within its time limit and leaves the worker to others.
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
    result = RecoveryResult()
    for batch in islice(recover_batches(batch_size=batch_size), max_batches):
        result += batch
    return {**describe(result), "exhausted": result.exhausted}


def _purge_expired_records(batch_size: int = PURGE_BATCH_SIZE, max_batches: int = MAX_BATCHES) -> dict[str, Any]:
    """Delete records past retention, up to ``max_batches`` batches of ``batch_size``. Parked ones stay.

    :returns: ``deleted``, a count of records; and ``exhausted``, False where the next run has something to do already.
    """
    deleted, exhausted = 0, True
    for batch in islice(purge_batches(batch_size=batch_size), max_batches):
        deleted, exhausted = deleted + batch.deleted, batch.exhausted
    return {"deleted": deleted, "exhausted": exhausted}


# Not as decorators: Celery has no types, and what it decorates would have none either.
recover_expired_leases = shared_task(
    name="idempotency.tasks.recover_expired_leases",
    acks_late=False,
    time_limit=TIME_LIMIT,
)(_recover_expired_leases)
purge_expired_records = shared_task(
    name="idempotency.tasks.purge_expired_records",
    acks_late=False,
    time_limit=TIME_LIMIT,
)(_purge_expired_records)
