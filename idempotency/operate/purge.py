"""The purge: delete records, recorded responses and sent messages past their retention, in bounded batches.

A batch is one transaction: it locks the oldest due rows that are not locked, deletes them, and commits. The database's
clock decides which rows are due. If the process dies before the COMMIT, nothing was deleted. Concurrent purges share
the rows and skip locked ones.

A claim is never purged, even if abandoned: its row holds the only information about it, so it must be recovered first.
A parked record waits for a decision. When only a response is deleted (``body_retention``), its record is kept, so that
the key is still recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from ..extensions import Purge, extensions
from ..lifecycle import Status
from ..models import BODY_DUE, IdempotencyRecord, RecordQuerySet
from ..protocol.faults import fault_point
from ..signals import purged
from ..store import PurgedRows, Upkeep, records_database
from .batches import BatchResult, check_batch_size, in_batches, in_transaction

# Small, because claims of the same keys wait for a batch, and a standby replays it in one piece. PostgreSQL deletes
# five thousand rows in 20 to 40 ms. Smaller batches take longer per row.
DEFAULT_BATCH_SIZE: Final = 5000
# Larger batches are not faster, and hold their row locks for longer than a claim waits for a lock.
MAX_BATCH_SIZE: Final = 10_000

PURGED: Final = frozenset({Status.COMPLETED, Status.RECOVERABLE})


@dataclass
class PurgeResult(BatchResult):
    """The result of one batch of a purge."""

    #: The number of deleted rows or, if responses are purged, of changed rows.
    deleted: int = 0

    @property
    def touched(self) -> int:
        return self.deleted


def due(*, include_parked: bool = False, using: str | None = None) -> RecordQuerySet:
    """The records that a purge would delete now."""
    records = RecordQuerySet(IdempotencyRecord, using=using or records_database())
    return records.past_retention().filter(status__in=_statuses(include_parked))


def purge_batches(
    *, batch_size: int = DEFAULT_BATCH_SIZE, include_parked: bool = False, using: str | None = None
) -> Iterator[PurgeResult]:
    """Delete records past retention, oldest first, until nothing more is due. The caller may stop between batches.

    :param batch_size: the maximum number of records per batch, 1 to 10,000.
    :param include_parked: also delete parked records.
    :raises ValueError: the batch size is not between 1 and 10,000.
    :raises RuntimeError: there is an open transaction.
    """
    using = using or records_database()
    statuses = _statuses(include_parked)
    batches = purge_oldest(using, batch_size, lambda upkeep, after: upkeep.delete_records(statuses, batch_size, after))
    for batch in batches:
        if batch.deleted:
            purged.send_robust(sender=IdempotencyRecord, count=batch.deleted)
        yield batch


def bodies_past_retention(using: str | None = None) -> RecordQuerySet:
    """The records that a purge would keep without their response now."""
    return RecordQuerySet(IdempotencyRecord, using=using or records_database()).filter(BODY_DUE)


def purge_body_batches(*, batch_size: int = DEFAULT_BATCH_SIZE, using: str | None = None) -> Iterator[PurgeResult]:
    """Purge recorded responses in batches, as ``purge_batches`` does records."""
    return purge_oldest(
        using or records_database(), batch_size, lambda upkeep, after: upkeep.delete_bodies(batch_size, after)
    )


def purge_oldest(
    using: str, batch_size: int, delete: Callable[[Upkeep, datetime | None], PurgedRows]
) -> Iterator[PurgeResult]:
    """Purge in batches.

    A batch starts where the previous one ended. If it started from the beginning, it would reread the index entries of
    all kept rows and of all deleted rows, which remain until a vacuum, so each batch would cost more than the last.

    :param delete: deletes the oldest rows that became due at a given time or later.
    """
    check_batch_size(batch_size, MAX_BATCH_SIZE)

    reached: datetime | None = None

    def work(upkeep: Upkeep) -> PurgedRows:
        rows = delete(upkeep, reached)
        fault_point["purge.selected"]()
        return rows

    def purge_next() -> PurgeResult:
        nonlocal reached
        # The COMMIT need not wait for the disk. If a server crash undoes the batch, the next run repeats it. A new
        # claim of a purged key comes later in the same log, so it can't survive without the deletion.
        rows = in_transaction(using, work, wait_for_disk=False)
        reached = rows.reached
        return PurgeResult(rows.changed, exhausted=rows.found < batch_size)

    return in_batches(purge_next)


def _statuses(include_parked: bool) -> frozenset[Status]:
    return PURGED | {Status.PARKED} if include_parked else PURGED


_BODIES: Final = Purge("bodies", "recorded response", bodies_past_retention, purge_body_batches)


def other_purges() -> list[Purge]:
    """The purges of rows other than records, in the order in which they run."""
    return [_BODIES, *(purge for each in extensions() for purge in each.purges)]
