"""The purge of bodies: delete recorded responses that are kept for a shorter time than their records.

Which those are was decided when they were recorded, by the ``body_ttl`` that the operation had then. The record stays,
so that its key is still recognised and the operation does not run again.

If the process dies before the COMMIT of a batch, nothing was deleted. If it dies after the COMMIT, the batch is done.
Several purges may run at once. A retry reads a record in one statement, so it finds the whole response or none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import datetime

from django.db import transaction

from .. import sql
from ..models import IdempotencyRecord, RecordQuerySet
from ..protocol.faults import fault_point
from ..protocol.transactions import alias
from .batches import check_batch_size
from .retention import DEFAULT_BATCH_SIZE, IDLE_TIMEOUT, MAX_BATCH_SIZE, MAX_ROUNDS, STATEMENT_TIMEOUT, PurgeResult


def bodies_past_retention(using: str | None = None) -> RecordQuerySet:
    """The records whose response a purge would delete now."""
    return RecordQuerySet(IdempotencyRecord, using=using or alias()).with_body_past_retention()


def purge_body_batches(*, batch_size: int = DEFAULT_BATCH_SIZE, using: str | None = None) -> Iterator[PurgeResult]:
    """Delete responses batch after batch, until nothing more is due. The caller may stop between any two.

    A partitioned table is purged one partition after the other. Rows that another transaction has locked are skipped;
    the next run takes them.

    :param batch_size: 1 to 10,000.
    :param using: a database alias; by default the one that records are written to.
    :returns: the results, which count records as ``deleted``.
    :raises ValueError: the batch size is not between 1 and 10,000.
    :raises DatabaseError: the database refuses. What earlier batches deleted stays deleted.
    """
    check_batch_size(batch_size, MAX_BATCH_SIZE)
    using = using or alias()
    left: deque[tuple[sql.Part, datetime | None]] = deque((part, None) for part in sql.store(using).parts())
    while left:
        batch = PurgeResult()
        while left and batch.deleted < batch_size:
            part, after = left.popleft()
            taken = _purge_part(using, part, batch_size - batch.deleted, after)
            if not taken.exhausted:
                left.appendleft((part, taken.reached))
            batch += taken
        batch.exhausted = not left
        yield batch


def _purge_part(using: str, part: sql.Part, limit: int, after: datetime | None) -> PurgeResult:
    """Delete up to ``limit`` responses of a part, in one transaction.

    :param after: skip responses that were due before this time, so that a batch does not read again the index entries
        of those that are deleted and not vacuumed yet.
    """
    store = sql.store(using)

    def transact() -> PurgeResult:
        with transaction.atomic(using=using, durable=True):
            # If a crash of the server loses the batch, the next run deletes it again.
            store.bound_transaction(idle=IDLE_TIMEOUT, statement=STATEMENT_TIMEOUT, wait_for_disk=False)
            batch = store.delete_bodies(part, limit, after)
            fault_point("purge.selected")
        return PurgeResult(batch.deleted, batch.reached, exhausted=batch.exhausted)

    return sql.retry_lost_races(MAX_ROUNDS, using, transact)
