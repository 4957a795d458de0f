"""The purge: forget records whose retention is over, one bounded batch at a time.

A record is past retention by the database's clock. Never purged is a claim, live or abandoned: an abandoned one is
recovered first, because its row is all that is known of it. A parked one waits for somebody to resolve it, unless the
caller says otherwise.

A batch that dies before its COMMIT deleted nothing; one that dies after it is done. Several purges may run at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from django.db import transaction

from .. import sql
from ..lifecycle import Status
from ..models import IdempotencyRecord, RecordQuerySet
from ..protocol.faults import fault_point
from ..protocol.transactions import alias
from ..signals import purged
from .batches import BatchResult, check_batch_size, in_batches

# A batch is one transaction, and so the most that a claim can come to wait for, that a standby has to replay at once,
# and that is lost when the process is killed. A thousand rows take PostgreSQL 5 to 10 ms.
DEFAULT_BATCH_SIZE: Final = 1000
# Above this a batch gains nothing and holds its row locks for longer than a claim waits for one.
MAX_BATCH_SIZE: Final = 10_000

PURGED: Final = frozenset({Status.COMPLETED, Status.RECOVERABLE})

# A batch is repeated when the database refused it because of another transaction, which under REPEATABLE READ each
# record that was claimed anew since the batch's snapshot can cause. It happens a few times at most, then it is trouble.
_MAX_ROUNDS = 5

# A purge that freezes before its COMMIT holds its rows, and so its clients' keys, for no longer than this.
_IDLE_TIMEOUT = timedelta(seconds=5)
# Nor does its statement run for longer, whatever the planner made of it. The largest batch needs a second.
_STATEMENT_TIMEOUT = timedelta(seconds=60)


@dataclass
class PurgeResult(BatchResult):
    """One batch of a purge."""

    #: How many rows are gone.
    deleted: int = 0
    #: When the last row of the batch fell due; None if the batch found none. The next batch starts there.
    reached: datetime | None = None

    @property
    def touched(self) -> int:
        return self.deleted


def due(*, include_parked: bool = False, using: str | None = None) -> RecordQuerySet:
    """The records that a purge would delete now."""
    records: RecordQuerySet = RecordQuerySet(IdempotencyRecord, using=using or alias())
    return records.past_retention().filter(status__in=_statuses(include_parked))


def purge_once(
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    include_parked: bool = False,
    after: datetime | None = None,
    using: str | None = None,
) -> PurgeResult:
    """Delete up to ``batch_size`` records past retention, oldest first, in a transaction of its own.

    ``after`` skips what ended before it; see ``purge_batches``. ``using`` is a database alias, by default the one
    that records are written to.

    Raises ValueError unless 1 <= batch_size <= MAX_BATCH_SIZE, and django.db.DatabaseError as the database does;
    nothing of the batch is deleted then.
    """
    check_batch_size(batch_size, MAX_BATCH_SIZE)
    using = using or alias()
    statuses = _statuses(include_parked)
    store = sql.store(using)

    def transact() -> PurgeResult:
        with transaction.atomic(using=using, durable=True):
            store.bound_transaction(idle=_IDLE_TIMEOUT, statement=_STATEMENT_TIMEOUT)
            batch = store.delete_due(statuses, batch_size, after)
            fault_point("purge.selected")
        return PurgeResult(batch.deleted, batch.reached, exhausted=batch.exhausted)

    result = sql.retry_lost_races(_MAX_ROUNDS, using, transact)
    if result.deleted:
        purged.send_robust(sender=IdempotencyRecord, count=result.deleted)
    return result


def purge_batches(
    *, batch_size: int = DEFAULT_BATCH_SIZE, include_parked: bool = False, using: str | None = None
) -> Iterator[PurgeResult]:
    """Purge batch after batch until nothing more is due. The caller may stop between any two.

    Each batch starts where the one before it ended. From the beginning it would walk again over the index entries of
    all that was deleted, which stay until a vacuum, and of all that is kept, so the last batch would cost the most.
    What another transaction held locked is passed over, and is the next run's.
    """

    def take(before: PurgeResult | None) -> PurgeResult:
        after = before.reached if before else None
        return purge_once(batch_size=batch_size, include_parked=include_parked, after=after, using=using)

    return in_batches(take)


def _statuses(include_parked: bool) -> frozenset[Status]:
    return PURGED | {Status.PARKED} if include_parked else PURGED
